"""Made-up hosts with faults, as files in a folder."""

from keras_ddl.launch.checks.finding import Severity

ROOT_MOUNT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"


NFS_MOUNT = (
    "613 29 0:52 / /mnt/ck\\040pt rw,relatime shared:331 - nfs4 filer:/export rw,vers=4.2,rsize=1048576,"
    "wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys,clientaddr=10.0.0.5,local_lock=none,"
    "addr=10.0.0.9\n"
)


def other_host(tmp_path, **files):
    """Returns a root with another host's /proc and /sys; `files`: contents by path, with _ for /."""
    contents = {
        "proc/cpuinfo": "flags : fpu avx2 avx512_vnni\n",
        "proc/self/mountinfo": ROOT_MOUNT,
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        **files,
    }
    for name, text in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def found(findings, subject):
    return [each for each in findings if each.subject == subject and each.severity > Severity.OK]
