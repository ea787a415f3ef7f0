"""ddlrun: translates its options to those of keras-ddl run, and starts ranks."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.emulated_hosts import emulated_hosts
from harness.name_tables import REFUSED, WORKS, row
from keras_ddl.ddl import ddlrun
from keras_ddl.errors import ConfigError

COMMAND = Path(sys.executable).with_name("ddlrun")


def run(*words: object, status: int = 0) -> str:
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_ddlrun_mode_follows_racks_and_aisles():
    four = [(f"h{i}", 2) for i in range(4)]
    assert ddlrun.mode_of(four, 1, 1) == "p"
    assert ddlrun.mode_of(four, 1, 2) == "p:2x2x2"
    assert ddlrun.mode_of(four, 2, 2) == "p:2x1x2x2"
    for hosts in (four[:3], [*four[:3], ("h3", 1)]):
        with pytest.raises(ConfigError, match="equal numbers of hosts"):
            ddlrun.mode_of(hosts, 1, 2)


def test_ddlrun_warns_of_another_ddl_beside_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import ddl")
    said = run("-accelerators", 2, "--dry-run", "python", script)
    assert "import ddl" not in said
    (tmp_path / "ddl.py").write_text("import tensorflow as tf\ntf.load_op_library('ddl_MDR.so')\n")
    said = run("-accelerators", 2, "--dry-run", "python", script)
    assert f"finds {tmp_path / 'ddl.py'}, which is next to the script" in said and "Rename the file" in said, said


def test_ddlrun_error_quotes_the_mode_as_written():
    with pytest.raises(ConfigError, match="Received: mode='b:4x2'"):
        ddlrun.ddl_options("b:4x2", [], [("h0", 2), ("h1", 2)])


def test_ddlrun_rankfile_gives_hosts_and_ranks():
    text = "# two hosts\nrank 0=h0 slot=0:0-9\nrank 1=h0     slot=1:0-9\n\nrank 2=h1 slots=0\n"
    assert ddlrun.parse_rankfile(text) == [("h0", 2), ("h1", 1)]
    for wrong in ("", "rank 1=h0", "rank 0=h0\nrank 1=h1\nrank 2=h0", "h0:2"):
        with pytest.raises(ConfigError, match="rank file"):
            ddlrun.parse_rankfile(wrong)


@row(
    "ddlrun -H",
    WORKS,
    "the hosts, by default this one; nothing is checked beforehand",
)
@row("ddlrun -host", WORKS, "the hosts, by default this one; nothing is checked beforehand")
@row("ddlrun -hostfile", WORKS)
@row(
    "ddlrun -accelerators",
    WORKS,
    "ranks per host, by default the GPUs of this one; required without GPUs",
)
@row("ddlrun -m", WORKS, "goes into DDL_OPTIONS; `p` by default")
@row("ddlrun -racks", WORKS, "also sets the default mode's dimensions, `p:4x8x2`, for hosts listed rack by rack")
@row("ddlrun -aisles", WORKS)
@row("ddlrun -ddlarg", WORKS, "goes into DDL_OPTIONS; checked before anything starts")
@row("ddlrun -ddloption", WORKS, "goes into DDL_OPTIONS; checked before anything starts")
@row("ddlrun -no_ddloptions", WORKS)
@row("ddlrun -rf", WORKS, "hosts and numbers of ranks; slots are not used")
@row("ddlrun -rankfile", WORKS, "hosts and numbers of ranks; slots are not used")
@row("ddlrun -tcp", WORKS, "sockets between hosts; Open MPI only")
@row("ddlrun -nodes", WORKS)
@row("ddlrun -mpiarg", WORKS, "for mpirun; Open MPI lacks Spectrum MPI's arguments (`-pami_noib`)")
def test_ddlrun_command_line(tmp_path):
    (tmp_path / "hosts").write_text("h0\n# h9\nh1\n")
    (tmp_path / "ranks").write_text("rank 0=h0 slot=0:0-3\nrank 1=h1 slot=0:0-3\n")
    shown = run(
        "-H", "h0,h1", "-accelerators", 2, "-m", "r:2x2", "--ddlarg", "-dump_iter 5", "--dry-run", "python", "t.py"
    )
    assert "'DDL_OPTIONS=-mode r:2x2 -dump_iter 5'" in shown and "--host h0:2,h1:2" in shown and "-np 4" in shown
    shown = run("--hostfile", tmp_path / "hosts", "--accelerators", 1, "--racks", 2, "--dry-run", "python", "t.py")
    assert "p:1x1x2" in shown and "--host h0:1,h1:1" in shown
    shown = run("-rf", tmp_path / "ranks", "--no_ddloptions", "-mpiarg", "--mca a b", "--dry-run", "python", "t.py")
    assert "DDL_OPTIONS= " in shown and "--host h0:1,h1:1" in shown and "--mca a b" in shown
    hosts = ("-host", "h0,h1", "-accelerators", 1)
    shown = run(*hosts, "-aisles", 2, "-ddloption", "-dbg_level 1", "-tcp", "--dry-run", "python", "t.py")
    assert "'DDL_OPTIONS=-mode p:1x1x1x2 -dbg_level 1'" in shown and "btl self,tcp" in shown
    assert "h0:1,h1:1" in run("-rankfile", tmp_path / "ranks", "--dry-run", "python", "t.py")
    assert "given once" in run("-H", "h0", "-rf", tmp_path / "ranks", "python", "t.py", status=2)
    assert "'-dump'" in run("-accelerators", 2, "--ddlarg", "-dump 5", "python", __file__, status=2)
    shown = run("-H", "h0,h1", "-nodes", 1, "--racks", 2, "-accelerators", 4, "--dry-run", "python", "t.py")
    assert "p:4x1x2" in shown


@row("ddlrun -np", REFUSED, "`-accelerators` and the hosts decide")
def test_ddlrun_mistakes_are_named_before_anything_starts():
    this_host = ("-accelerators", 2)
    for words, message in (
        (("-np", 2), "Set the number per host with -accelerators"),
        ((*this_host, "-nodes", 2), "Received: no hosts, so only this one. Name them with -H"),
        (("-H", "h0,h1", *this_host, "-nodes", 2, "-racks", 2), "Received: 2 host(s)"),
        ((*this_host, "-racks", 2), "Received: none. Name them with -H"),
        ((*this_host, "-m", "b:4"), "must equal the number of ranks (2)"),
        (("-H", "h0,h1", *this_host, "-ddlarg", "-mode b:4x1"), "every 4 consecutive ranks must run on one host"),
    ):
        assert message in run(*words, "python", __file__, status=2), words


@row("ddlrun -mode", WORKS, "goes into DDL_OPTIONS; `p` by default")
@row("ddlrun -v", WORKS, "shows the command that starts the ranks; `--dry-run` does only that")
@row("ddlrun -verbose", WORKS, "shows the command that starts the ranks; `--dry-run` does only that")
@row("ddlrun -help", WORKS)
@pytest.mark.parallel
def test_ddlrun_starts_ranks_with_its_options():
    program = "import os; print(os.environ['OMPI_COMM_WORLD_RANK'], os.environ['DDL_OPTIONS'])"
    given = ("--accelerators", 2, "--mode", "b:2x1", "--ddlarg", "-dbg_level 1")
    shown = run(*given, "-v", "python", "-c", program)
    assert "0 -mode b:2x1 -dbg_level 1" in shown and "[1] 1 -mode b:2x1 -dbg_level 1" in shown
    assert "host_ranks -np 2" in shown and "host_ranks -np 2" in run(
        *given, "-verbose", "--dry-run", "python", "-c", program
    )
    assert "-accelerators" in run("-help")


# Two steps in graph mode; prints each rank's host and position, the box, and the learned weights.
PROGRAM = """
import socket

import numpy as np
import tensorflow.compat.v1 as tf

import ddl
import keras_ddl

w = np.random.default_rng(ddl.rank()).normal(size=100_000)
with tf.Graph().as_default(), tf.Session() as session:
    w = tf.Variable(w)
    train = tf.train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(w * ddl.rank()))
    session.run(tf.global_variables_initializer())
    session.run(train)
    learned = float(session.run(tf.reduce_sum(w)))
place = keras_ddl.topology()
print(socket.gethostname(), ddl.local_rank(), ddl.num_hosts(), "x".join(map(str, place.dims)), repr(learned))
"""


@pytest.mark.long
@pytest.mark.alone
def test_ddlrun_on_several_hosts(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "hosts").write_text("h0\nh2\n")
    (tmp_path / "ranks").write_text("rank 0=h0 slot=0:0\nrank 1=h1 slot=0:0\nrank 2=h1 slot=0:1\n")
    cases = {
        ("-H", "h0,h1", "-accelerators", 1, "-tcp"): ["h0 0 2 1x2", "h1 0 2 1x2"],
        ("-hostfile", "hosts", "-accelerators", 2, "-m", "r:2x2"): [f"h{h} {i} 2 2x2" for h in (0, 2) for i in (0, 1)],
        ("-rf", "ranks"): ["h0 0 2 ", "h1 0 2 ", "h1 1 2 "],
        ("-H", "h0,h1,h2,h3", "-accelerators", 1, "-racks", 2): [f"h{h} 0 4 1x2x2" for h in range(4)],
    }
    with emulated_hosts(tmp_path, 4, num_racks=2) as hosts:
        for options, places in cases.items():
            before = hosts.sent()
            shown = hosts.run("ddlrun", *options, "-mpiarg", hosts.agent, "python", "train.py")
            lines = sorted(line.partition("] ")[2] or line for line in shown.splitlines())
            assert [line.rpartition(" ")[0] for line in lines] == places, shown
            start = np.random.default_rng(0).normal(size=100_000).sum()
            mean_rank = (len(places) - 1) / 2
            for line in lines:
                np.testing.assert_allclose(float(line.rpartition(" ")[2]), start - 100_000 * mean_rank, rtol=1e-9)
            assert hosts.sent()["h0"] - before["h0"] > 8 * 100_000  # the weights, at least
