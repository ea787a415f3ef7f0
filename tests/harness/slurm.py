"""A private Slurm on this machine: slurmctld, munged and one slurmd per node, under a temporary folder.

It uses the programs of an installed Slurm, but nothing else of it. It needs root (slurmd starts jobs as other users)
and a slurmd that accepts -N, like Debian's. It uses no control groups, because containers rarely have them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "scancel", "squeue", "sinfo", "scontrol")
# Debian's Slurm needs libpmix.so, which is part of libpmix-dev.
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins libpmix-dev"

_CONFIGURATION = """
ClusterName=keras-ddl-tests
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=300
NodeName=n[0-1] NodeHostname={host} Port=[{ports[1]}-{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str | None:
    """Returns why Slurm cannot be started here, or None if it can."""
    if os.geteuid() != 0:
        return "needs root: slurmd starts jobs as other users"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"no {', '.join(absent)} here. Debian, Ubuntu: apt-get install {PACKAGES}" if absent else None


class Slurm:
    """A running Slurm of two nodes, n0 and n1, both on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI", "PRTE_"))
        }
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path(), "PYTHONSAFEPATH": "1"}

    def run(self, *command: str | Path, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a program that talks to this Slurm; stderr goes to stdout."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def submit(self, script: Path, *options: str | Path, **variables: str) -> tuple[str, Path]:
        """Submits a batch script; returns the job's id and the file of its output."""
        output = Path(tempfile.mkdtemp(dir=self.folder)) / "output"
        done = self.run("sbatch", "--parsable", f"--output={output}", *options, script, **variables)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip(), output

    def state(self, job: str) -> dict[str, str]:
        """Returns the fields of `scontrol show job` by name."""
        words = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str, seconds: float) -> dict[str, str]:
        """Waits for the end of a job; returns its state."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        wait_until(lambda: self.state(job)["JobState"] not in running, seconds, lambda: str(self.state(job)))
        return self.state(job)


def wait_until(condition: Callable[[], object], seconds: float, text: Callable[[], str]) -> None:
    """Returns when `condition` holds; fails with `text` if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {text()}"
        time.sleep(0.1)


@contextmanager
def running() -> Iterator[Slurm]:
    """Starts a Slurm, and ends it with everything that still runs in it."""
    with ExitStack() as stack:
        # Not pytest's folder, because the path of a socket is limited to 107 characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        folder.chmod(0o755)
        for name in ("munge", "state", "spool.n0", "spool.n1", "tmp.n0", "tmp.n1"):
            (folder / name).mkdir(mode=0o755)
        slurm = Slurm(folder)
        host = socket.gethostname().split(".")[0]
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=host, folder=folder, ports=_free_ports(3)))
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
        munge = [f"--{option}={folder / 'munge' / name}" for option, name in files.items()]
        # --force: everyone may write to /tmp.
        _start(stack, slurm, "munged", "--foreground", "--force", *munge)
        wait_until((folder / "munge" / "socket").exists, 10, lambda: _logs(folder))
        _start(stack, slurm, "slurmctld", "-D", "-c")
        for node in ("n0", "n1"):
            _start(stack, slurm, "slurmd", "-D", "-N", node)
        both = ("sinfo", "--noheader", "--format=%D %t")
        wait_until(lambda: slurm.run(*both).stdout.strip() == "2 idle", 20, lambda: _logs(folder))
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--user=root")
            wait_until(lambda: not slurm.run("squeue", "--noheader").stdout.strip(), 30, lambda: _logs(folder))


def _start(stack: ExitStack, slurm: Slurm, name: str, *arguments: str) -> None:
    log = stack.enter_context((slurm.folder / f"{name}-{len(list(slurm.folder.glob('*.log')))}.log").open("w"))
    process = subprocess.Popen(
        [shutil.which(name, path=_path()), *arguments], env=slurm.environment, stdin=subprocess.DEVNULL,
        stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))


def _path(base: Mapping[str, str] = os.environ) -> str:
    return f"{base.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    """Returns free ports; the last two are adjacent."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("", 0))
            ports = [first.getsockname()[1] + number for number in range(count)]
            try:
                for port in ports[1:]:
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return ports
