"""Runs every program of benchmarks/, examples/, notebooks/ and tools/ in its smallest form, here or in a named test.

The programs are found, not listed. A new one in benchmarks/ must support --smoke and show its command in its
docstring; a new one in another folder must be in SMALLEST or in ELSEWHERE.
"""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
IN_TURN = Path(__file__).with_name("in_turn.py")
LACKING = 77  # the status of benchmarks/_smoke.py
SECONDS = 500  # only a hang takes longer

NEEDS = {"benchmarks/survival_peers.py": "torch", "benchmarks/torch_ddp.py": "torch"}
# Programs of other folders -> the command of their smallest form.
SMALLEST = {
    "examples/contrastive.py": "keras-ddl run -np 2 python {} --epochs 1",
    "examples/horovod/keras_digits.py": "keras-ddl run -np 2 python {} --epochs 1",
    "examples/horovod/tape_digits.py": "keras-ddl run -np 2 python {} --steps 4",
    "examples/own_collective.py": "keras-ddl run -np 2 python {} --iterations 2",
    "tools/breakages.py": "python {} --only LOST_AFTER_SECONDS=0",
    "tools/generate_allowed_ops.py": "python {} allowed_ops.txt",
    "tools/versions.py": "python {} 3.15+2.21 --check import",
}
# Programs run by a test of their own folder, or by a target of the Makefile that .ci/run uses.
TRANSLATION = "tests/project/examples/test_translation_"
DDL = "integrations/ddl/tests/test_ddl_examples.py"
TORCH = "integrations/torch/tests/test_example.py"
WORKS_WITH = "tests/project/works_with/test_works_with.py"
GPU = "integrations/torch/tests/test_gpu_check.py"
EXAMPLES = "tests/project/examples/test_examples.py"
ELSEWHERE = {
    "examples/custom_loop.py": f"{EXAMPLES}::test_custom_loop_learns_on_two_ranks",
    "examples/ddl/export_saved_model.py": f"{DDL}::test_ddl_saved_model_needs_nothing_of_keras_ddl",
    "examples/ddl/export_train.py": f"{DDL}::test_ddl_saved_model_needs_nothing_of_keras_ddl",
    "examples/ddl/graph_mode.py": f"{DDL}::test_ddl_graph_mode_learns_saves_and_resumes",
    "examples/ddl/keras_callbacks.py": f"{DDL}::test_ddl_keras_learns",
    "examples/ddl/sequences.py": f"{DDL}::test_ddl_three_graphs_learn",
    "examples/demo.py": "Makefile::demo:",
    "examples/digits.py": f"{EXAMPLES}::test_digits_alone_and_resumed",
    "examples/horovod/elastic_digits.py": f"{EXAMPLES}::test_elastic_horovod_script_continues",
    "examples/images/study.py": "tests/project/examples/test_images.py::test_study_runs_each_training_once",
    "examples/images/train.py": "tests/project/examples/test_images.py::test_training_scales_the_rate_with_the_batch",
    "examples/predict_client.py": "serving/tests/test_clients.py::test_client_example_works",
    "examples/predict_saved_model.py": f"{EXAMPLES}::test_demo_trains_exports_and_predicts",
    "examples/recommender/dlrm.py": f"{WORKS_WITH}::test_recommenders_with_sharded_tables_equal_one_process",
    "examples/recommender/two_tower.py": f"{WORKS_WITH}::test_recommenders_with_sharded_tables_equal_one_process",
    "examples/torch/digits.py": f"{TORCH}::test_digits_learns_on_two_ranks",
    "examples/torch/keras_digits.py": f"{TORCH}::test_keras_on_two_ranks_equals_one_process",
    "examples/translation/__main__.py": f"{TRANSLATION}serving.py::test_command_translates_in_its_own_process",
    "examples/translation/corpus.py": f"{TRANSLATION}run.py::trained",
    "examples/translation/evaluation.py": f"{TRANSLATION}run.py::test_evaluation_gives_the_scores_of_the_training",
    "examples/translation/studies/divergence.py": f"{TRANSLATION}divergence.py::test_command_trains_in_all_ways",
    "examples/translation/studies/scaling.py": f"{TRANSLATION}scaling.py::test_predictions_are_printed",
    "examples/translation/studies/strong_scaling.py": f"{TRANSLATION}scaling.py::test_predictions_are_printed",
    "examples/translation/studies/table_bytes.py": f"{TRANSLATION}table_bytes.py::test_ranks_hold_the_computed_bytes",
    "examples/translation/training.py": f"{TRANSLATION}run.py::trained",
    "notebooks/01_first_run.ipynb": "tests/project/notebooks/test_notebooks.py::test_first_run_from_top_to_bottom",
    "notebooks/02_serving.ipynb": "tests/project/notebooks/test_notebooks.py::test_serving_from_top_to_bottom",
    "notebooks/03_translation.ipynb": "tests/project/notebooks/test_notebooks.py::test_translation_from_top_to_bottom",
    "tools/fuzz.py": "tests/communicator/test_fuzz.py::test_fuzz_equals_numpy",
    "tools/gpu_check/against_numpy.py": f"{GPU}::test_programs_run_on_the_cpu",
    "tools/gpu_check/checks.py": f"{GPU}::test_programs_run_on_the_cpu",
    "tools/gpu_check/killed_rank.py": f"{GPU}::test_programs_run_on_the_cpu",
    "tools/gpu_check/speed.py": f"{GPU}::test_programs_run_on_the_cpu",
    "tools/missing_rules.py": "tests/cut/test_missing_rules.py::test_missing_names_the_sufficient_slice",
    "tools/mutants.py": "tests/cut/test_mutants.py::test_tests_notice_mutants",
    "tools/structure/__main__.py": "Makefile::lint: $(STAMP)",
    "tools/wheel.py": "Makefile::wheel: $(BIN)/python",
}


def is_program(path: Path) -> bool:
    """Returns whether a file acts as a program: it has a main guard, or statements other than definitions."""
    if path.suffix == ".ipynb":
        return True
    text = path.read_text(encoding="utf-8")
    statements = ast.parse(text).body
    return '__name__ == "__main__"' in text or any(isinstance(each, (ast.With, ast.For)) for each in statements)


def programs() -> list[str]:
    """Returns the programs of the four folders; files that begin with `_` are parts of others."""
    found = [
        path
        for folder in ("benchmarks", "examples", "notebooks", "tools")
        for pattern in ("*.py", "*.ipynb")
        for path in (ROOT / folder).rglob(pattern)
        if path.name == "__main__.py" or not path.name.startswith("_")
    ]
    own = [path for path in found if not any(part.startswith("_") for part in path.relative_to(ROOT).parts[:-1])]
    return sorted(str(path.relative_to(ROOT)) for path in own if is_program(path))


PROGRAMS = programs()
RUN_HERE = [each for each in PROGRAMS if each.startswith("benchmarks/") or each in SMALLEST]


def command_of(program: str) -> tuple[list[str], list[str]]:
    """Returns the command that starts a program, and the program with its arguments."""
    if program in SMALLEST:
        before, _, after = SMALLEST[program].partition("{}")
        return shlex.split(before), [str(ROOT / program), *shlex.split(after)]
    document = ast.get_docstring(ast.parse((ROOT / program).read_text(encoding="utf-8"))) or ""
    found = re.search(rf"^ *(.*?) *{re.escape(program)}", document, re.MULTILINE)
    assert found, f"the docstring of {program} shows no command that runs it"
    return shlex.split(found[1]), [str(ROOT / program), "--smoke"]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as a page shows it, with this Python; it may begin with VARIABLE=value and sudo."""
    beside = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    while "=" in words[0]:
        environment |= [words[0].split("=", 1)]
        words = words[1:]
    words = [str(beside / word) if word in ("python", "keras-ddl") else word for word in words if word != "sudo"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(words, cwd=folder, env=environment, text=True, timeout=SECONDS, check=False, **pipes)


_said: dict[str, str] = {}  # program -> how it failed in a shared job; "" if it did not


def run_in_turn(programs: list[str]) -> None:
    """Runs programs with the same launch command in one job."""
    start, _ = command_of(programs[0])
    with tempfile.TemporaryDirectory() as folder:
        commands = [shlex.join(command_of(each)[1]) for each in programs]
        done = run([*start, str(IN_TURN), folder, *commands], Path(folder))
        parts = re.split(r"^==== \d+\n", done.stdout, flags=re.MULTILINE)
        for number, program in enumerate(programs):
            has_ended = all(Path(folder, f"{number}.{rank}").exists() for rank in range(2))
            has_begun = number + 1 < len(parts)
            why = done.stdout[-6000:] if has_begun else f"not run, because of one before it:\n{done.stdout[-3000:]}"
            printed = has_begun and parts[number + 1].strip()
            _said[program] = ("" if printed else "it printed nothing") if has_ended else why


@pytest.mark.long
@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.parametrize("program", RUN_HERE)
def test_program_runs(program: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if program in NEEDS and importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is not installed")
    start, words = command_of(program)
    if "-np" in start and program not in NEEDS:
        if program not in _said:
            items = [each for each in request.session.items if getattr(each, "originalname", "") == "test_program_runs"]
            chosen = [each.callspec.params["program"] for each in items]
            run_in_turn([each for each in chosen if command_of(each)[0] == start and each not in NEEDS])
        assert not _said[program], _said[program]
        return
    done = run([*start, *words], tmp_path)
    if done.returncode == LACKING:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.strip()


def test_every_program_is_run_by_a_test() -> None:
    """For programs that do not run here, the named test exists, and its file names the program."""
    assert sorted({*RUN_HERE, *ELSEWHERE}) == PROGRAMS
    assert not ELSEWHERE.keys() & set(RUN_HERE)
    assert set(NEEDS) <= set(RUN_HERE)
    for program, place in ELSEWHERE.items():
        file, _, name = place.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def )?{re.escape(name)}", text, re.MULTILINE), f"{program}: {place}"
        path = Path(program)
        names = {path.name, path.stem, path.parent.name if path.stem == "__main__" else path.stem}
        assert any(each in text for each in names), f"{program} does not occur in {file}"


@pytest.mark.parallel
def test_benchmark_ends_with_the_error_of_a_rank_that_fails_at_startup(tmp_path: Path) -> None:
    done = run(
        ["KERAS_DDL_MODE=nonsense", "python", str(ROOT / "benchmarks" / "all_reduce.py"), "--smoke", "--peers", ""],
        tmp_path,
    )
    assert done.returncode == 1
    assert "ConfigError: mode must be" in done.stdout, done.stdout  # the rank's error
    assert done.stdout.splitlines()[-1].startswith("keras_ddl: its ranks ended while they started, with status "), done
