"""Mutants of the cut's rules (tools/mutants.py): a daily sample is noticed, and every explained mutant exists."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.source_modules import load_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools" / "mutants.py"
MUTATIONS = ROOT / "tools" / "mutations.py"


@pytest.mark.long
def test_mutants_differ_and_explained_ones_exist():
    module = load_program(MUTATIONS)
    mutants = module.all_mutants()
    names = {each.name for each in mutants}
    assert len(names) >= 500
    assert sorted(module.explained() - names) == []
    made = [each for each in mutants if each.file == "specs/contractions.py"]
    trees = {module.ast.dump(module.tree_of(each)) for each in made}
    unchanged = module.ast.dump(module.ast.parse((ROOT / "keras_ddl/cut/specs/contractions.py").read_text()))
    assert len(trees) == len(made) > 20 and unchanged not in trees


@pytest.mark.long
@pytest.mark.alone
def test_tests_notice_mutants(tmp_path):
    command = [sys.executable, str(PROGRAM), "--sample", "20", "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert ended.returncode == 0, ended.stdout + ended.stderr
