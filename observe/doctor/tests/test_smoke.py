"""keras-ddl doctor finds defects of hosts."""

import pytest
from made_hosts import NFS_MOUNT, ROOT_MOUNT, found, other_host

from keras_ddl.doctor import host


@pytest.mark.parametrize(
    "file, text, subject",
    [
        ("proc/cpuinfo", "flags : fpu avx2\n", "oneDNN"),
        ("sys/fs/cgroup/cpu.max", "50000 100000\n", "CPU"),
        ("sys/fs/cgroup/memory.max", str(1 << 30), "memory"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", str(1 << 30), "memory"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "huge pages"),
        ("proc/self/mountinfo", ROOT_MOUNT + NFS_MOUNT.replace("/mnt/ck\\040pt", "/"), "directory"),
    ],
)
def test_doctor_finds_defects_of_the_host(tmp_path, file, text, subject):
    well = host.check(tmp_path, {}, other_host(tmp_path / "well"))
    assert found(well, subject) == []
    ill = found(host.check(tmp_path, {}, other_host(tmp_path / "ill", **{file: text})), subject)
    assert len(ill) == 1 and ill[0].remedy
