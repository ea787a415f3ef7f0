"""The breakages of tools/breakages/ apply to the sources as they are; and what tools/breakages.py makes of them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.source_modules import load_program

ROOT = Path(__file__).resolve().parents[2]


breakages = load_program(ROOT / "tools" / "breakages.py")
Breakage, Verdict = breakages.Breakage, breakages.Verdict
TABLE = breakages.read_tables()
TRIED_PARTS = ("export", "serving", "cost_model", "doctor", "horovod", "ddl", "torch", "timeline")
ROOMS = "files checkpoint topology communicator launch ops gradients data cut strategy callbacks cli"


@pytest.mark.parametrize("each", TABLE, ids=lambda each: f"{Path(each.file).stem}: {each.line[:40]}")
def test_breakage_applies(each):
    broken = each.apply((ROOT / each.file).read_text(encoding="utf-8"))
    assert broken != (ROOT / each.file).read_text(encoding="utf-8")
    if each.is_native:
        names = (ROOT / "native" / "tests" / "CMakeLists.txt").read_text()
        for name in each.target.split():
            assert re.search(rf"\b{name.removesuffix('_test')}\b", names), name
        assert each.target and each.tests
    else:
        paths = [word.partition("::")[0] for word in shlex.split(each.tests) if "/" in word]
        assert paths and all((ROOT / path).exists() for path in paths), paths


def test_table_has_every_part_of_the_project_and_no_line_twice():
    assert len({(each.file, each.line, each.broken) for each in TABLE}) == len(TABLE)
    folders = {f"keras_ddl/{room}/" for room in ROOMS.split()} | {"native/"}
    folders |= {f"{place}/" for name in TRIED_PARTS if (ROOT / (place := breakages.PARTS[name])).exists()}
    assert [folder for folder in sorted(folders) if not any(each.file.startswith(folder) for each in TABLE)] == []


def breakage(**changed):
    return Breakage(**{"file": "a.py", "line": "x = 1", "broken": "x = 2", "tests": "tests", "breaks": "x", **changed})


def test_line_is_replaced_where_it_stands_and_refused_where_that_does_not_work():
    assert breakage().apply("def f():\n    x = 1\n    return x\n") == "def f():\n    x = 2\n    return x\n"
    for text in ("x = 2\n", "x = 1\nif x:\n    x = 1\n", "x = 1  # one\n"):
        with pytest.raises(breakages.Unusable, match=r"a\.py: the line must occur exactly once\. Received: [02] of 'x"):
            breakage().apply(text)
    with pytest.raises(breakages.Unusable, match="is not valid Python"):
        breakage(broken="x = (").apply("x = 1\n")


def test_sample_is_that_of_its_seed():
    every = [breakage(breaks=str(number)) for number in range(50)]
    one, same, other = (breakages.chosen(every, None, 10, seed) for seed in (1, 1, 2))
    assert one == same != other and len(set(one)) == 10
    assert breakages.chosen(every, "49", 10, 1) == every[-1:]


@pytest.mark.parametrize(
    ("kinds", "status", "text"),
    [
        (["noticed", "NOT NOTICED"], 1, "1 of 2 noticed, in 3 s"),
        (["noticed", "skipped"], 0, "1 of 1 noticed, 1 skipped, in 3 s"),
        (["noticed", "ERROR"], 1, "1 of 1 noticed, 1 ERROR, in 3 s"),
        (["passed", "FAILED"], 1, "1 of 2 passed, in 3 s"),
    ],
)
def test_summary_fails_unless_all_are_noticed(kinds, status, text, capsys):
    assert breakages.summary([Verdict(kind) for kind in kinds], 3) == status
    assert capsys.readouterr().out == f"{text}\n"


def test_overlay_is_what_processes_import_and_leaves_the_file_alone():
    file = "keras_ddl/config.py"
    installed = ROOT / file
    text = installed.read_text() + "\nBROKEN = True\n"
    code = "import keras_ddl.config as c; from keras_ddl.cli import main; print(c.__file__, c.BROKEN)"
    with breakages.overlay(file, text) as (environment, changed):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/")
        assert done.stdout == f"{changed} True\n", done.stderr
        assert list(changed.parent.glob("__pycache__/config.*.pyc"))
        left = subprocess.Popen(["sleep", "600"], env=environment)
    assert left.wait(60) < 0 and not changed.exists()
    assert "BROKEN" not in installed.read_text()


def test_command_that_takes_too_long_is_interrupted():
    code = "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('cleaned up')"
    assert breakages._run([sys.executable, "-c", code], dict(os.environ), 6) == (None, "cleaned up\n")
    assert breakages._run([sys.executable, "-c", "print(1); raise SystemExit(3)"]) == (3, "1\n")
