"""IBM's command: how its options become those of keras-ddl run, and that it starts ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from keras_ddl.cli import ddlrun
from keras_ddl.errors import ConfigError

COMMAND = Path(sys.executable).with_name("ddlrun")


def run(*words: object, status: int = 0) -> str:
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_ddlrun_mode_is_the_box_of_racks_and_aisles():
    four = [(f"h{i}", 2) for i in range(4)]
    assert ddlrun.mode_of(four, 1, 1) == "p"
    assert ddlrun.mode_of(four, 1, 2) == "p:2x2x2"
    assert ddlrun.mode_of(four, 2, 2) == "p:2x1x2x2"
    for hosts in (four[:3], [*four[:3], ("h3", 1)]):
        with pytest.raises(ConfigError, match="equally many"):
            ddlrun.mode_of(hosts, 1, 2)


def test_ddlrun_rankfile_gives_hosts_and_ranks():
    text = "# two hosts\nrank 0=h0 slot=0:0-9\nrank 1=h0     slot=1:0-9\n\nrank 2=h1 slots=0\n"
    assert ddlrun.parse_rankfile(text) == [("h0", 2), ("h1", 1)]
    for wrong in ("", "rank 1=h0", "rank 0=h0\nrank 1=h1\nrank 2=h0", "h0:2"):
        with pytest.raises(ConfigError, match="rank file"):
            ddlrun.parse_rankfile(wrong)


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
    assert "given once" in run("-H", "h0", "-rf", tmp_path / "ranks", "python", "t.py", status=2)
    assert "'-dump'" in run("-accelerators", 2, "--ddlarg", "-dump 5", "python", __file__, status=2)


@pytest.mark.parallel
def test_ddlrun_starts_ranks_with_its_options():
    program = "import os; print(os.environ['OMPI_COMM_WORLD_RANK'], os.environ['DDL_OPTIONS'])"
    shown = run("--accelerators", 2, "--mode", "b:2x1", "--ddlarg", "-dbg_level 1", "python", "-c", program)
    assert "0 -mode b:2x1 -dbg_level 1" in shown and "[1] 1 -mode b:2x1 -dbg_level 1" in shown
