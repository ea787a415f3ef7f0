"""Mutants of the rules of the cut (tools/mutants.py): a few of the day, and that the list of explained ones is true."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.source_modules import load_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools" / "mutants.py"
MUTATIONS = ROOT / "tools" / "mutations.py"


def test_explained_mutants_can_still_be_made():
    module = load_program(MUTATIONS)
    names = {each.name for each in module.all_mutants()}
    assert len(names) >= 500
    assert sorted(module.explained() - names) == []


def test_a_mutant_is_its_file_with_one_change():
    module = load_program(MUTATIONS)
    made = [each for each in module.all_mutants() if each.file == "specs/contractions.py"]
    trees = {module.ast.dump(module.tree_of(each)) for each in made}
    unchanged = module.ast.dump(module.ast.parse((ROOT / "keras_ddl/cut/specs/contractions.py").read_text()))
    assert len(trees) == len(made) > 20 and unchanged not in trees


@pytest.mark.long
@pytest.mark.alone
def test_tests_notice_mutants(tmp_path):
    command = [sys.executable, str(PROGRAM), "--sample", "20", "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert ended.returncode == 0, ended.stdout + ended.stderr
