"""keras-ddl doctor: what it finds on hosts made for it, on this one, and on two real ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_hosts import NFS_MOUNT, ROOT_MOUNT, found, other_host

from keras_ddl import packages
from keras_ddl.doctor import checkpoint_directory, host, ranks
from keras_ddl.launch.checks import host_facts
from keras_ddl.launch.checks.finding import Finding, Severity, merged, worst

# As a client of Linux 6.1 shows it.
DOCTOR = [sys.executable, "-m", "keras_ddl.cli", "doctor"]


@pytest.mark.parametrize(
    "name, value, severity",
    [
        ("KERAS_BACKEND", "torch", Severity.ERROR),
        ("TF_USE_LEGACY_KERAS", "1", Severity.ERROR),
        ("PYTHONDONTWRITEBYTECODE", "1", Severity.WARNING),
        ("I_MPI_PIN", "1", Severity.WARNING),
        ("TF_XLA_FLAGS", "--tf_xla_auto_jit=2", Severity.WARNING),
    ],
)
def test_doctor_finds_variables_that_hurt(tmp_path, name, value, severity):
    findings = host.check(tmp_path, {name: value}, other_host(tmp_path / "root"))
    assert [each.severity for each in found(findings, name)] == [severity]
    assert found(host.check(tmp_path, {}, tmp_path / "root"), name) == []


def test_doctor_compares_hosts():
    one = {"host": "h0", "keras_ddl": "1", "TensorFlow": "2.21", "Keras": "3.15", "Python": "3.12", "MPI": "x"}
    other = {**one, "host": "h1", "Keras": "3.14", "offset": 5.0, "offset_error": 0.1, "cores": [0]}
    one |= {"offset": 0.0, "offset_error": 0.1, "cores": [0, 1]}
    findings = list(ranks.compare([one, one, one, other]))
    assert {each.subject for each in findings if each.severity > Severity.OK} == {
        "versions of Keras",
        "clocks",
        "cores",
    }
    (versions,) = found(findings, "versions of Keras")
    assert versions.found == "3.15 on h0, but 3.14 on h1" and versions.severity is Severity.ERROR
    assert found(findings, "cores")[0].host == "h0"
    assert worst(list(ranks.compare([one, {**one, "host": "h1"}]))) is Severity.OK


def test_doctor_says_which_rank_has_which_gpu():
    missing = Finding(Severity.WARNING, "GPUs", "TensorFlow sees none", "install")
    gpus_by_rank = [("h0", "GPU 0 (H100)", "a", None), ("h0", "GPU 1 (H100)", "b", None), ("h1", "", "", missing)]
    own, other = ranks.compare_gpus([*gpus_by_rank, gpus_by_rank[2]])
    assert own == Finding(Severity.OK, "GPUs of ranks", "rank 0: GPU 0 (H100), rank 1: GPU 1 (H100)", "", "h0")
    assert other.host == "h1" and other.found == missing.found
    (shared,) = ranks.compare_gpus([gpus_by_rank[0], gpus_by_rank[0]])
    assert shared.severity is Severity.WARNING and "one rank for each GPU" in shared.remedy


@pytest.mark.parametrize("offset, error, is_found", [(1.3, 0.1, True), (1.3, 0.4, False), (-1.3, 0.1, True)])
def test_doctor_takes_clocks_for_different_only_beyond_what_the_round_trip_leaves_open(offset, error, is_found):
    told = [{"host": "h0", "offset": 0.0, "offset_error": 0.0}, {"host": "h1", "offset": offset, "offset_error": error}]
    assert bool(list(host_facts.compare_clocks(told))) is is_found


def test_clock_offset_is_bounded_by_the_round_trip():
    assert host_facts.clock_offset(107.5, 100.0, 101.0) == (7.0, 0.5)


def test_doctor_tells_file_systems_apart():
    lines = [ROOT_MOUNT, NFS_MOUNT, "35 22 0:29 / /tmp rw - tmpfs tmpfs rw,size=1g", "no such line"]
    found = [each for line in lines if (each := checkpoint_directory.parse(line)) is not None]
    kinds = {path: checkpoint_directory.mount_of(Path(path), found).kind for path in ("/a", "/mnt/ck pt/run", "/tmp")}
    assert kinds == {"/a": "ext4", "/mnt/ck pt/run": "nfs4", "/tmp": "tmpfs"}
    nfs = checkpoint_directory.mount_of(Path("/mnt/ck pt"), found)
    assert nfs.source == "filer:/export" and {"hard", "vers=4.2", "relatime"} <= nfs.options


def test_doctor_warns_of_a_soft_nfs_mount(tmp_path):
    soft = ROOT_MOUNT + NFS_MOUNT.replace("/mnt/ck\\040pt", "/").replace("hard", "soft")
    (warning,) = found(host.check(tmp_path, {}, other_host(tmp_path / "root", **{"proc/self/mountinfo": soft})), "NFS")
    assert warning.severity is Severity.WARNING and "hard" in warning.remedy


def can_mount():
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-m", "true"]).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting needs root")
def test_doctor_tries_what_makes_a_checkpoint_whole(tmp_path):
    (fine,) = [each for each in checkpoint_directory.check(tmp_path, tmp_path) if "renamed" in each.found]
    assert fine.severity is Severity.OK and not list(tmp_path.iterdir())
    code = "import sys; from pathlib import Path; from keras_ddl.doctor import checkpoint_directory as one\n"
    code += "print(*one.check(Path(sys.argv[1]), Path('/')), sep='\\n')"
    script = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert "is on tmpfs (none)" in shown.stdout and "No space left on device" in shown.stdout, shown
    assert shown.stdout.count("Severity.ERROR") == 1, shown


def test_doctor_finds_the_limits_of_control_groups_above(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job/step\n0::/slurm/job/step\n")
    assert host.cpu_limit(tmp_path) is None and host.memory_limit(tmp_path) is None
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000")
    write("sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", str(2**63 - 4096))
    write("sys/fs/cgroup/slurm/job/cpu.max", "300000 100000")
    assert host.cpu_limit(tmp_path) == 3 and host.memory_limit(tmp_path) == 1000
    write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "150000")
    write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    assert host.cpu_limit(tmp_path) == 1.5


def test_findings_that_all_hosts_share_are_told_once():
    bad = Finding(Severity.WARNING, "memory", "little", "more")
    both = [Finding(*[*vars(bad).values()][:4], host=name) for name in ("h0", "h1")]
    assert merged([Finding(Severity.OK, "CPU", "2"), *both], 2)[0] == bad
    assert merged(both, 3)[0].host == "h0, h1"


def test_doctor_says_errors_of_this_host_without_ranks(tmp_path):
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    shown = subprocess.run([*DOCTOR, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 1, shown.stderr
    subjects = {each["subject"]: each for each in json.loads(shown.stdout)}
    assert subjects["KERAS_BACKEND"]["severity"] == "error"
    assert "training" not in subjects


@pytest.mark.parallel
def test_doctor_tries_collectives_and_a_training_on_ranks(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    shown = subprocess.run([*DOCTOR, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode in (0, 3), shown.stdout + shown.stderr
    told = {each["subject"]: each for each in json.loads(shown.stdout)}
    for subject in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "objects", "training"):
        assert told[subject]["severity"] == "ok", told[subject]
    assert "weights bitwise equal" in told["training"]["found"]


def test_doctor_finds_that_a_host_does_not_answer(tmp_path):
    words = [*DOCTOR, "--json", "--hosts", "no-such-host.invalid:2"]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 1, shown.stderr
    (found,) = [each for each in json.loads(shown.stdout) if each["subject"] == "ranks"]
    assert found["severity"] == "error" and "no-such-host.invalid" in found["found"]


def test_two_tensorflows_overwrite_each_other(tmp_path, monkeypatch):
    for name in ("tensorflow-cpu", "tensorflow"):
        info = tmp_path / f"{name.replace('-', '_')}-2.21.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.21.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (remedy,) = (each.remedy for each in host._software() if each.subject == "TensorFlow")
    assert remedy == f"They overwrite each other's files: {packages.install_tensorflow()}"
