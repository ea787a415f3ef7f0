"""Two hosts whose link breaks: the ranks on either side have an error within ten seconds that names the other host.

The hosts are network namespaces joined by a cable (a veth pair) that a rank pulls.
"""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from harness.rank_tests import find_mpirun, run_ranks

_AGENT = """#!/bin/bash
# Runs a command on a host, as mpirun wants it from ssh: AGENT HOST COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec NAME-$host unshare --uts --ipc --mount bash -c '
  hostname "$0"; mount --bind HOSTS /etc/hosts; mount -t tmpfs tmpfs /dev/shm
  case $1 in */mpirun) exec "$@";; *) exec bash -c "$*";; esac' "$host" "$@"
"""


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture
def cable(tmp_path):
    """Makes the hosts l0 and l1; returns the agent that runs commands there. They are gone afterwards."""
    name = f"kdl{os.getpid()}"
    if (
        shutil.which("ip") is None
        or subprocess.run(["ip", "netns", "add", f"{name}-l0"], capture_output=True).returncode
    ):
        pytest.skip("needs the right to make network namespaces (root, and iproute2)")
    try:
        _ip(f"netns add {name}-l1")
        _ip(f"-n {name}-l0 link add eth0 type veth peer name eth0 netns {name}-l1")
        for i in (0, 1):
            _ip(f"-n {name}-l{i} addr add 10.79.0.{i + 1}/24 dev eth0")
            _ip(f"-n {name}-l{i} link set eth0 up")
            _ip(f"-n {name}-l{i} link set lo up")
        hosts = tmp_path / "hosts"
        hosts.write_text("127.0.0.1 localhost\n10.79.0.1 l0\n10.79.0.2 l1\n")
        agent = tmp_path / "agent"
        agent.write_text(_AGENT.replace("NAME", name).replace("HOSTS", str(hosts)))
        agent.chmod(0o755)
        yield agent
    finally:
        for i in (0, 1):
            subprocess.run(["ip", "netns", "del", f"{name}-l{i}"], capture_output=True)


def loses_the_link(scene, folder):
    import signal
    import threading

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank, size = keras_ddl.rank(), keras_ddl.size()
    assert (keras_ddl.num_hosts(), size) == (2, 4)
    data = np.zeros(16 << 20, np.float32)
    communicator.all_reduce_array(data, name="before")
    pulled = Path(folder, "pulled")

    def pull():
        time.sleep(1.5)
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        pulled.write_text(repr(time.monotonic()))

    if rank == 0:
        threading.Thread(target=pull).start()
    try:
        while scene == "inside":
            communicator.all_reduce_array(data, name="data", out=data)
        while rank == 3 and not pulled.exists():
            time.sleep(0.1)
        keras_ddl.barrier("never complete")
        message = "no error"
    except errors.RankLostError as error:
        message = str(error)
    Path(folder, f"survivor-{rank}").write_text(f"{time.monotonic() - float(pulled.read_text()):.3f} {message}")
    while len(list(Path(folder).glob("survivor-*"))) < size:
        time.sleep(0.01)
    try:
        os.kill(os.getppid(), signal.SIGKILL)  # the launcher of this host: it might wait for the other for ever
    except ProcessLookupError:
        pass
    os._exit(1)


@pytest.mark.parallel
@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("scene", ["waiting", "inside"])
def test_link_that_breaks_is_an_error_on_both_sides(tmp_path, cable, scene):
    mpirun = [str(cable), "l0", find_mpirun(), "--bind-to", "none", "--oversubscribe", "-np", "4"]
    mpirun += ["--prtemca", "plm_ssh_agent", str(cable), "--host", "l0:2,l1:2"]
    env = {"KERAS_DDL_LOST_AFTER_SECONDS": "4" if scene == "inside" else None}
    outcome = run_ranks(loses_the_link, 4, args=(scene, str(tmp_path)), mpirun=mpirun, env=env)
    told = {path.name: path.read_text() for path in tmp_path.glob("survivor-*")}
    assert len(told) == 4, (told, outcome.text())
    for name, text in told.items():
        seconds, _, message = text.partition(" ")
        lost = r"rank\(s\) 2, 3 on host l1" if name < "survivor-2" else r"rank\(s\) 0 on host l0"
        assert re.search(rf"no sign of life from {lost} for \d+ s", message), told
        assert float(seconds) < 30, told  # within ten, unless the machine is busy with something else
