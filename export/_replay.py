"""Has a SavedModel answer a stored sample, and compares with the stored answers.

Who answers is a function: the clean process of an export's proof (validate.py), or `answer_here`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

ROWS, ANSWERS, THREADS = "rows:", "answers:", "threads"  # in golden.npz

# (rows, or None only to load; threads of one op, or None for all cores) -> answers, seconds of each stage
Ask = Callable[[Mapping[str, Any] | None, int | None], tuple[Mapping[str, Any], dict[str, float]]]


def storable(array: Any) -> Any:
    """Returns an array that .npz keeps without pickle: bytes for strings, float32 for bfloat16 (exact)."""
    import numpy as np

    array = np.asarray(array)
    if array.dtype.kind in "OSU":
        return array.astype("S")
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def kernel_threads() -> int:
    """Returns how many threads one op may use in this process: as the program or the environment says, or all cores.

    Matrix products split their sums by this number, so their last bits follow it.
    """
    import tensorflow as tf

    stated = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    chosen = tf.config.threading.get_intra_op_parallelism_threads() or (int(stated) if stated.isdecimal() else 0)
    return chosen or len(os.sched_getaffinity(0))


def compare(golden: Mapping[str, Any], answers: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    """Compares outputs by name.

    Returns: bitwise (bool), largest (difference divided by max(1, largest |golden|)), problems (sentences). Strings and
    whole numbers must be equal; floats may differ by `tolerance` so measured; NaN equals NaN.
    """
    import numpy as np

    problems, bitwise, largest = [], True, 0.0
    if set(golden) != set(answers):
        problems.append(f"outputs are {sorted(answers)}, not {sorted(golden)}")
    for name in sorted(set(golden) & set(answers)):
        expected, received = golden[name], storable(answers[name])
        if expected.shape != received.shape:
            problems.append(f"{name} has shape {list(received.shape)}, not {list(expected.shape)}")
        elif expected.dtype.kind in "fc":
            bitwise &= np.array_equal(expected, received, equal_nan=True)
            scale = max(1.0, float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))))
            with np.errstate(invalid="ignore"):
                gaps = np.abs(expected.astype(np.complex128) - received.astype(np.complex128)) / scale
            alike = (expected == received) | (np.isnan(expected) & np.isnan(received))
            gap = float(np.max(np.where(alike, 0.0, np.where(np.isnan(gaps), np.inf, gaps)), initial=0.0))
            largest = max(largest, gap)
            if gap > tolerance:
                problems.append(f"{name} differs by {gap:.3g} of its scale (allowed {tolerance:.3g})")
        elif not np.array_equal(expected, received):
            bitwise = False
            problems.append(f"{name} differs in {int(np.sum(expected != received))} of {expected.size} values")
    return {"bitwise": bool(bitwise and not problems), "largest": largest, "problems": problems}


def load_rows(file: str, prefix: str = "") -> dict[str, Any]:
    """Returns name -> array of those arrays in an .npz file whose names begin with `prefix`."""
    import numpy as np

    with np.load(file) as archive:
        return {name.removeprefix(prefix): archive[name] for name in archive.files if name.startswith(prefix)}


def replay(ask: Ask, sample: str | None, golden: str | None, skip: list[str], tolerance: float) -> dict[str, Any]:
    """Asks rows and compares with the golden outputs, but for those in `skip`.

    Args:
        sample: .npz of input name -> rows, asked when there is no `golden`.
        golden: .npz of rows (names begin with ROWS), of what they were answered in training (ANSWERS), and with how
            many threads (THREADS).
    Returns: what `compare` does, and rows, outputs (names), threads, seconds of loading and of answering.
    """
    import numpy as np

    threads = None
    if golden is not None:
        rows = load_rows(golden, ROWS)
        with np.load(golden) as archive:
            threads = int(archive[THREADS]) if THREADS in archive.files else None
    else:
        rows = load_rows(sample) if sample is not None else None
    answers, seconds = ask(rows, threads)
    result: dict[str, Any] = {"bitwise": False, "largest": 0.0, "problems": []}
    if golden is not None:
        expected = {name: answer for name, answer in load_rows(golden, ANSWERS).items() if name not in skip}
        result = compare(expected, {name: each for name, each in answers.items() if name not in skip}, tolerance)
    result["rows"] = max((len(row) for row in (rows or {}).values() if row.ndim), default=1 if rows else 0)
    return {**result, "outputs": sorted(answers), "threads": threads or kernel_threads(), "seconds": seconds}


def answer_here(path: str) -> Ask:
    """Returns a function that loads `path` and answers in this process, with as many threads as this process has."""

    def ask(rows: Mapping[str, Any] | None, threads: int | None) -> tuple[dict[str, Any], dict[str, float]]:
        import tensorflow as tf

        start = time.perf_counter()
        served = tf.saved_model.load(path)  # kept: its signatures do not keep the variables alive
        function = served.signatures["serving_default"]
        loaded = time.perf_counter()
        answers: dict[str, Any] = {}
        if rows is not None:
            specs = function.structured_input_signature[1]
            refuse_other_names(rows, specs)
            feed = {name: tf.cast(tf.constant(row), specs[name].dtype) for name, row in rows.items()}
            answers = {name: tensor.numpy() for name, tensor in function(**feed).items()}
        return answers, {"load": loaded - start, "answer": time.perf_counter() - loaded}

    return ask


def refuse_other_names(rows: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raises: ValueError: the sample's names are not those of the inputs."""
    if set(rows) != set(inputs):
        raise ValueError(f"the sample holds {sorted(rows)}, the graph takes {sorted(inputs)}")
