"""keras-ddl run on several hosts, simulated by UTS namespaces: separate host names and processes, one network."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from harness.emulated_hosts import can_make_namespaces
from harness.launching import python_path
from keras_ddl.config import Seconds
from launch.launching import Started, kill, processes, run, write_program, write_script

AGENT = """
# Replaces ssh: [options] HOST COMMAND...
while [[ $1 == -* ]]; do shift; done
host=$1; shift
MORE
exec unshare --uts bash -c 'hostname "$0"; exec bash -c "$*"' "$host" "$@"
"""


def write_agent(folder: Path, more: str = "") -> str:
    """Writes a replacement for ssh that does `more` before the command; returns its path."""
    return write_script(folder / "agent", AGENT.replace("MORE", more))


def can_make_hosts() -> bool:
    return can_make_namespaces("--uts")


needs_hosts = pytest.mark.skipif(not can_make_hosts(), reason="namespaces need root")
pytestmark = [pytest.mark.parallel, pytest.mark.quiet, needs_hosts]


@pytest.fixture
def on_hosts(tmp_path: Path) -> list[str]:
    return ["run", "--hosts", "h0:2,h1:2", "--mpi-arg", f"--prtemca plm_ssh_agent {write_agent(tmp_path)}"]


def test_run_hosts_gives_every_rank_the_environment_and_names_the_host_of_a_failure(
    on_hosts: list[str], tmp_path: Path
):
    program = write_program(
        tmp_path,
        """
import socket
run_dir = Path(os.environ["KERAS_DDL_RUN_DIR"])
print(RANK, socket.gethostname(), os.environ["GIVEN"], os.environ["SET"], run_dir.is_dir(), os.getcwd(), flush=True)
here("up")
if RANK == 3:
    while len(list(Path().glob("up-*"))) < 4: time.sleep(0.02)
    raise ValueError("over there")
time.sleep(600)
""",
    )
    ended = run([*on_hosts, "--env", "GIVEN=1", "python", program], tmp_path, env={"SET": "2"})
    lines = [f"{f'[{rank}] ' if rank else ''}{rank} h{rank // 2} 1 2 True {tmp_path}" for rank in range(4)]
    assert ended.status == 1 and sorted(ended.out.splitlines()) == sorted(lines), ended
    assert "rank 3 on host h1 failed first" in ended.err, ended
    assert ended.err.splitlines()[-1] == "ValueError: over there", ended


@pytest.mark.long
def test_run_hosts_restarts_without_a_lost_host(on_hosts: list[str], tmp_path: Path):
    # mpirun itself ends with status 0 if a host is lost.
    source = 'here("up"); print(RANK, "of", os.environ["OMPI_COMM_WORLD_SIZE"], flush=True)\n'
    source += 'if os.environ["KERAS_DDL_RESTART"] == "0": time.sleep(600)'
    program = write_program(tmp_path, source)
    started = Started([*on_hosts, "--restarts", "2", "-np", "2:", "python", program], tmp_path)
    started.wait_for(*(tmp_path / f"up-{rank}" for rank in range(4)))
    started.may_leave = ("prted.", "keras_ddl-")  # no process is left on that host to remove it
    kill_host(started.mark, "h1")
    ended = started.finish()
    assert ended.status == 0, ended
    assert "keras-ddl: restart 1 of 2, with 2 ranks on h0:2 (rank" in ended.err, ended
    assert {"0 of 2", "[1] 1 of 2"} <= set(ended.out.splitlines()), ended


def kill_host(mark: str, name: str) -> None:
    """Kills everything on the host at once, like a power cut."""
    victims = []
    for pid in processes(mark):
        shown = subprocess.run(["nsenter", "--uts", "--target", str(pid), "hostname"], capture_output=True, text=True)
        if shown.stdout.strip() == name:
            victims.append(pid)
    assert len(victims) >= 5, processes(mark)  # the daemon, two wrappers, two programs
    for pid in victims:
        os.kill(pid, signal.SIGSTOP)
    for pid in victims:
        kill(pid)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="MPICH is not installed")
def test_run_hosts_with_hydra(on_hosts: list[str], tmp_path: Path):
    program = write_program(tmp_path, "import socket; print(RANK, socket.gethostname())")
    hydra = ["--mpirun", "mpiexec.hydra", "--mpi-arg", f"-launcher ssh -launcher-exec {tmp_path / 'agent'}"]
    ended = run([*on_hosts[:3], *hydra, "python", program], tmp_path)
    assert ended.status == 0, ended
    assert sorted(ended.out.splitlines()) == ["0 h0", "[1] 1 h0", "[2] 2 h1", "[3] 3 h1"], ended


# Changes the facts of host h1: versions, clock and shared memory.
OTHER_FACTS = """
import socket, time
if socket.gethostname() == "h1":
    from keras_ddl.launch.checks import host_facts
    facts = host_facts.facts
    host_facts.facts = lambda: {**facts(), %s}
    time_time = time.time
    time.time = lambda: time_time() + %s
"""


def with_other_h1(tmp_path: Path, changed: str, seconds_ahead: float = 0.0) -> dict[str, str]:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OTHER_FACTS % (changed, seconds_ahead))
    return {"PYTHONPATH": python_path(folder)}


def test_run_hosts_with_different_versions_start_nothing(on_hosts: list[str], tmp_path: Path):
    program = write_program(tmp_path, "here('up')")
    env = with_other_h1(tmp_path, '"Keras": "3.1.0", "shm": 4096')
    ended = run([*on_hosts, "--restarts", "3", "python", program], tmp_path, env=env)
    assert ended.status == 1 and ended.seconds < Seconds.START, ended
    assert not list(tmp_path.glob("up-*")), ended
    lines = [line.strip() for line in ended.err.splitlines()]
    assert any(line.startswith("versions of Keras: ") and "but 3.1.0 on h1. Install the same" in line for line in lines)
    shm = "keras-ddl: warning: /dev/shm on host h1: 4 KiB free (expected: 8 MiB or more). Give containers more"
    assert any(line.startswith(shm) for line in lines), ended
    assert "restart" not in ended.err, ended


# Runs beside each daemon, ends a second after it, and then removes its file.
LATE = r"""
touch "$TMPDIR/late.$$"
setsid bash -c 'while kill -0 $0; do sleep 0.1; done; sleep 1; rm "$TMPDIR/late.$0"' $$ </dev/null >/dev/null 2>&1 &
"""


@pytest.mark.long
def test_run_hosts_waits_for_late_daemons(on_hosts: list[str], tmp_path: Path):
    # Open MPI's daemons remove their directories after mpirun has ended, a second or two later on a busy host.
    write_agent(tmp_path, LATE)
    env = with_other_h1(tmp_path, '"Keras": "3.1.0"')
    ended = run([*on_hosts, "python", write_program(tmp_path, "")], tmp_path, env=env)  # checks for leftovers
    assert ended.status == 1 and "versions of Keras" in ended.err, ended


@pytest.mark.long
def test_run_hosts_warns_of_a_different_clock(on_hosts: list[str], tmp_path: Path):
    env = with_other_h1(tmp_path, "", seconds_ahead=60.0)
    program = write_program(
        tmp_path,
        """
from keras_ddl.launch.checks import host_facts
print(RANK, "ahead by", round(host_facts.measured_clock()["offset"], -1))
""",
    )
    ended = run([*on_hosts, "python", program], tmp_path, env=env)
    assert ended.status == 0, ended
    assert "[1] 1 ahead by 0.0" in ended.out.replace("-0.0", "0.0") and "[3] 3 ahead by 60.0" in ended.out, ended
    warning = next(line for line in ended.err.splitlines() if "clocks" in line)
    assert "of h0 is 60" in warning or "of h0 is 59" in warning, ended
    assert "s behind that of h1 (expected: within 1 s)" in warning and "chrony" in warning, ended


SSH = """
# ssh -G HOST prints where ssh would connect to.
if [[ $1 == -G ]]; then echo "hostname 127.0.0.1"; echo "port PORT"; exit; fi
sleep 600
"""


def test_run_unreachable_host_ends_the_job_in_seconds(tmp_path: Path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and nothing listens
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        write_script(ssh, SSH.replace("PORT", str(sock.getsockname()[1])))
        env = {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}
        ended = run(["run", "--hosts", "h1:2", "python", write_program(tmp_path, "")], tmp_path, env=env)
    assert ended.status == 1 and ended.seconds < Seconds.START, ended
    assert "    ssh to host h1: nothing listens on its port" in ended.err and "Try: ssh h1 true." in ended.err, ended


@pytest.mark.long
def test_run_preflight_can_be_skipped(on_hosts: list[str], tmp_path: Path):
    env = with_other_h1(tmp_path, '"Keras": "3.1.0"') | {"KERAS_DDL_PREFLIGHT": "0"}
    ended = run([*on_hosts, "python", write_program(tmp_path, "")], tmp_path, env=env)
    assert ended.status == 0, ended
