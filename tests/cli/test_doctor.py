"""keras-ddl doctor: what it finds on hosts made for it, on this one, and on two real ranks."""

import json
import os
import subprocess
import sys

import pytest

from keras_ddl.doctor import host, ranks
from keras_ddl.launch.finding import Finding, Severity, merged, worst

DOCTOR = [sys.executable, "-m", "keras_ddl.cli", "doctor"]


def other_host(tmp_path, **files):
    """A root with /proc and /sys of another host; `files`: contents by path, with _ for /."""
    contents = {
        "proc/cpuinfo": "flags : fpu avx2 avx512_vnni\n",
        "proc/mounts": "disk / ext4 rw 0 0\n",
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


@pytest.mark.parametrize(
    "file, text, subject",
    [
        ("proc/cpuinfo", "flags : fpu avx2\n", "oneDNN"),
        ("sys/fs/cgroup/cpu.max", "50000 100000\n", "CPU"),
        ("sys/fs/cgroup/memory.max", str(1 << 30), "memory"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "huge pages"),
        ("proc/mounts", "disk / ext4 rw 0 0\nserver:/a / nfs4 rw 0 0\n", "directory"),
    ],
)
def test_doctor_finds_what_the_host_lacks(tmp_path, file, text, subject):
    well = host.check(tmp_path, {}, other_host(tmp_path / "well"))
    assert found(well, subject) == []
    ill = found(host.check(tmp_path, {}, other_host(tmp_path / "ill", **{file: text})), subject)
    assert len(ill) == 1 and ill[0].remedy


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
    other = {**one, "host": "h1", "Keras": "3.14", "clock": 105.0, "cores": [0]}
    one |= {"clock": 100.0, "cores": [0, 1]}
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
