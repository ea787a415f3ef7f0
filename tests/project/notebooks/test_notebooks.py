"""Runs the notebooks on a real kernel, and keras_ddl.run in cells."""

import ast
import json
import os
import queue
import re
import time
from pathlib import Path

import pytest

from harness.examples import EXAMPLES

NOTEBOOKS = sorted((Path(__file__).parents[3] / "notebooks").glob("*.ipynb"))
SMALL = {"EPOCHS": "2", "NUM_RANKS": "2"}

pytestmark = pytest.mark.parallel


# Functions import Jupyter, because at the top the import would delay test collection by a second.
def execute(notebook, folder: Path, **env: str):
    """Executes all cells with `folder` as the working directory; an exception in a cell fails the test."""
    from nbclient import NotebookClient

    client = NotebookClient(notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    # Without our MPLBACKEND, because the kernel's own puts figures into the cells.
    outer = ("OMPI_", "KERAS_DDL_", "MPLBACKEND")
    return client.execute(env={name: value for name, value in os.environ.items() if not name.startswith(outer)} | env)


def text_of(cell, name: str) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == name)


def run_notebook(name: str, folder: Path, **env: str) -> dict:
    """Runs one of our notebooks, with `env` in addition to the common variables; returns its cells by id."""
    import nbformat

    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    places = {"RESULT_DIR": str(folder / "results"), "DATA_DIR": str(folder)}
    notebook = execute(nbformat.read(path, 4), folder, **(SMALL | places | env))
    assert [entry.name for entry in folder.iterdir()] == ["results"]  # everything was written to RESULT_DIR
    return {cell.id: cell for cell in notebook.cells}


def assert_has_picture(cell) -> None:
    assert any("image/png" in out.get("data", {}) for out in cell.outputs), cell.id


@pytest.mark.long
@pytest.mark.slow
def test_first_run_from_top_to_bottom(tmp_path: Path):
    results = tmp_path / "results"
    cells = run_notebook("01_first_run", tmp_path)
    output = text_of(cells["run"], "stdout")
    assert "Epoch 1/2" in output and "val_accuracy" in output, output
    assert "[1] Epoch" not in output
    assert text_of(cells["agree"], "stdout").startswith("rank 0: weights "), cells["agree"].outputs
    assert "accuracy on 360 held-out images" in text_of(cells["predict"], "stdout")
    for name in ("data", "curve", "predict"):
        assert_has_picture(cells[name])
    assert (results / "ckpt" / "base" / "saved_model.pb").exists()
    assert (results / "saved_model" / "1" / "saved_model.pb").exists()


@pytest.mark.long
@pytest.mark.slow
def test_serving_from_top_to_bottom(tmp_path: Path):
    cells = run_notebook("02_serving", tmp_path)
    output = {name: text_of(cell, "stdout") for name, cell in cells.items() if cell.cell_type == "code"}
    assert "version 1: step 22, " in output["export"] and "as the trained model did" in output["export"], output
    read = [re.search(r"version (\d) reads ([\d.]+)% of 397 new digits", output[name]) for name in ("rest", "switch")]
    assert [found[1] for found in read] == ["1", "2"], output
    # The right model's accuracy on the right digits; chance is 10 %.
    assert 30 < float(read[0][2]) < float(read[1][2]), output
    assert float(re.search(r"version 1; largest difference from REST: (\S+)", output["grpc"])[1]) < 1e-5, output
    answered = ast.literal_eval(output["switch"].partition("answers by version: ")[2].splitlines()[0])
    assert set(answered) == {1, 2} and answered[2] == 100, output  # version 1 kept answering while 2 was loaded
    assert output["end"] == "the server ended with status 0\n"
    for name in ("rest", "switch"):
        assert_has_picture(cells[name])


@pytest.mark.long
def test_translation_from_top_to_bottom(tmp_path: Path):
    sizes = {"width": 16, "heads": 2, "inner": 16, "layers": 1, "tokens": 3000, "buckets": 1, "average": 1}
    small = {"PAIRS": "400", "EPOCHS": "1", "SIZES": json.dumps(sizes), "EXAMPLES_DIR": str(EXAMPLES)}
    cells = run_notebook("03_translation", tmp_path, **small)
    output = {name: text_of(cell, "stdout") for name, cell in cells.items() if cell.cell_type == "code"}
    pairs = [line.split(" | ") for line in output["data"].splitlines()[:6]]
    assert all(len(pair) == 2 and pair[0] != pair[1] for pair in pairs), output
    assert "400 pairs of sentences" in output["train"] and "tokens_per_second" in output["train"], output
    assert re.search(r"phrases never seen: \d+\.\d% translated to the letter, BLEU \d", output["curve"]), output
    assert "twenty-third of May, 1997 -> " in output["attention"], output
    assert re.search(r"\n1 rank\(s\): [\d,]+ words/s, 2 rank\(s\): [\d,]+ words/s\n$", output["speed"]), output
    for name in ("rate", "curve", "attention", "speed"):
        assert_has_picture(cells[name])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path):
    import nbformat

    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None), cell.id


def test_notebook_cell_shows_output_results_and_exceptions(tmp_path: Path):
    from nbformat.v4 import new_code_cell, new_notebook

    cells = [
        "import os, sys, keras_ddl\nfactor = 10\nclass Own:\n    def __init__(self, x): self.x = x",
        "def work(x):\n"
        "    rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        "    print('printed by', rank); print('warned by', rank, file=sys.stderr)\n"
        "    return Own(x * factor + rank)\n"
        "[own.x for own in keras_ddl.run(work, np=2, args=(4,))]",
        "def fail():\n    value = {}\n    return value['no such key']\n\n"
        "try:\n    keras_ddl.run(fail, np=2)\n"
        "except KeyError as error:\n    print(repr(error), error.__cause__, sep='\\n')",
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    _, works, fails = execute(notebook, tmp_path).cells
    assert sorted(text_of(works, "stdout").splitlines()) == ["[1] printed by 1", "printed by 0"]
    assert sorted(text_of(works, "stderr").splitlines()) == ["[1] warned by 1", "warned by 0"]
    assert works.outputs[-1].data["text/plain"] == "[40, 41]"
    shown = text_of(fails, "stdout")
    assert shown.startswith("KeyError('no such key')\n"), shown
    # The traceback has the cell's line, although the rank has never seen the notebook.
    assert "return value['no such key']" in shown, shown


def test_notebook_cell_streams_output_and_can_be_interrupted(tmp_path: Path):
    from jupyter_client.manager import start_new_kernel

    source = (
        "import keras_ddl, os, time\n"
        "def work():\n"
        "    print('rank', os.environ['OMPI_COMM_WORLD_RANK'], 'pid', os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "keras_ddl.run(work, np=2)\n"
    )
    manager, kernel = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        request = kernel.execute(source)
        lines = read_lines(kernel, 2)  # while the cell runs
        manager.interrupt_kernel()
        reply = kernel.get_shell_msg(timeout=300)
        while reply["parent_header"]["msg_id"] != request:
            reply = kernel.get_shell_msg(timeout=300)
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["ename"] == "KeyboardInterrupt", reply
    pids = [int(line.split()[-1]) for line in lines]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def read_lines(kernel, count: int) -> list[str]:
    """Returns the first `count` lines that the kernel's cell prints."""
    text = ""
    deadline = time.monotonic() + 300
    while text.count("\n") < count and time.monotonic() < deadline:
        try:
            message = kernel.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
    return text.splitlines()
