"""Other users of this machine: they find no port of a job whose ranks are all on one host, and no socket to open."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_ddl.launch import mpirun
from launch.launching import AS_NOBODY, Started, processes, write_program

pytestmark = pytest.mark.parallel

# Opens every port of its arguments, says nothing, and stays; then tries the UNIX sockets.
STRANGER = """
import os, socket, sys, time
held = []
for port in map(int, sys.argv[2:]):
    held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
opened = []
for folder, _, names in os.walk(sys.argv[1], onerror=lambda error: None):
    for name in names:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                socket.socket(socket.AF_UNIX, kind).connect(os.path.join(folder, name))
                opened.append(name)
            except OSError:
                pass
print("connected", len(held), opened, flush=True)
time.sleep(600)
"""
MEETS = """
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
here("up")
while not Path("go").exists(): time.sleep(0.02)
keras_ddl.barrier()
print("fine", flush=True)
"""


def listeners(pids: list[int]) -> Iterator[tuple[int, str, int]]:
    """(process, address in hexadecimal, port) of what these processes listen to by TCP or UDP."""
    owners = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink()))
            except OSError:
                continue
            if found:
                owners[found[1]] = pid
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in owners and (state == "0A" or protocol.startswith("udp")):
                address, port = local.split(":")
                yield owners[inode], address, int(port, 16)


def started(tmp_path: Path, *options: str) -> Started:
    job = Started(["run", "-np", "2", *options, "python", write_program(tmp_path, MEETS)], tmp_path)
    job.wait_for(tmp_path / "up-0", tmp_path / "up-1")
    return job


def ends_well(job: Started) -> None:
    (job.folder / "go").touch()
    ended = job.finish()
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["[1] fine", "fine"], ended


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_job_on_one_host_listens_on_no_port_and_another_user_cannot_hold_it_up(tmp_path: Path):
    # Open for others as /tmp is, but for what the job itself protects.
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    job = started(tmp_path)
    ports = [str(port) for _, _, port in listeners(list(processes(job.mark)))]
    command = [*AS_NOBODY, sys.executable, "-I", "-S", "-c", STRANGER, str(job.tmp), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            line = stranger.stdout.readline()
            ends_well(job)
        finally:
            stranger.kill()
    assert line == "connected 0 []\n" and ports == []


@pytest.mark.long
def test_ranks_that_mpirun_starts_on_one_host_listen_on_no_port(tmp_path: Path):
    job = started(tmp_path, "--mpirun", mpirun.find().path)
    names = processes(job.mark)
    found = [(names[pid], address) for pid, address, _ in listeners(list(names))]
    ends_well(job)
    assert [each for each in found if "prterun" not in each[0] and "mpirun" not in each[0].split()[0]] == []
