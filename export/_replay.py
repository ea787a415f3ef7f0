"""Loads a SavedModel as a server would, answers a stored sample, and compares with the stored answers.

Run as a program, it is the clean process of an export's proof: it imports TensorFlow and NumPy only, refuses Keras and
keras_ddl on purpose, sees no GPU, reads one JSON request from stdin and writes one line of JSON to stdout. It starts
importing TensorFlow before the request comes, so that the exporter's work goes on meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

BLOCKED = ("keras", "tf_keras", "keras_ddl")
ROWS, ANSWERS, THREADS = "rows:", "answers:", "threads"  # in golden.npz
MARK = "keras_ddl-replay:"  # TensorFlow or a site hook may also print to stdout


def block_imports() -> None:
    """Makes what a server does not have look as if it were not installed, also to code that only looks for it."""
    for name in BLOCKED:
        sys.modules[name] = None  # type: ignore[assignment]


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


def take_threads_of(golden: str) -> None:
    """Gives TensorFlow, not started yet, as many threads as gave the answers in `golden`, where that was noted."""
    import numpy as np
    import tensorflow as tf

    with np.load(golden) as archive:
        if THREADS in archive.files:
            tf.config.threading.set_intra_op_parallelism_threads(int(archive[THREADS]))


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


def replay(path: str, sample: str | None, golden: str | None, skip: list[str], tolerance: float) -> dict[str, Any]:
    """Loads `path`, answers rows and compares with the golden outputs, but for those in `skip`.

    Args:
        sample: .npz of input name -> rows, answered when there is no `golden`.
        golden: .npz of rows (names begin with ROWS), of what they were answered in training (ANSWERS), and with how
            many threads (THREADS), which only a process of its own can take over (`main`).
    Returns: what `compare` does, and rows, outputs (names), threads, seconds of loading and of answering.
    """
    import tensorflow as tf

    start = time.perf_counter()
    served = tf.saved_model.load(path)  # kept: its signatures do not keep the variables alive
    function = served.signatures["serving_default"]
    loaded = time.perf_counter()
    result: dict[str, Any] = {"bitwise": False, "largest": 0.0, "problems": [], "rows": 0, "outputs": []}
    if golden is not None or sample is not None:
        rows = load_rows(golden, ROWS) if golden is not None else load_rows(sample)
        specs = function.structured_input_signature[1]
        if set(rows) != set(specs):
            raise ValueError(f"the sample holds {sorted(rows)}, the graph takes {sorted(specs)}")
        feed = {name: tf.cast(tf.constant(row), specs[name].dtype) for name, row in rows.items()}
        answers = {name: tensor.numpy() for name, tensor in function(**feed).items()}
        result["rows"] = max((len(row) for row in rows.values() if row.ndim), default=1)
        result["outputs"] = sorted(answers)
        if golden is not None:
            expected = {name: answer for name, answer in load_rows(golden, ANSWERS).items() if name not in skip}
            compared = {name: answer for name, answer in answers.items() if name not in skip}
            result.update(compare(expected, compared, tolerance))
    result["threads"] = kernel_threads()
    result["seconds"] = {"load": loaded - start, "answer": time.perf_counter() - loaded}
    return result


def main() -> None:
    """Answers the request on stdin: the arguments of `replay` as JSON. No request: ends."""
    block_imports()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        return
    try:
        request = json.loads(line)
        if request["golden"] is not None:
            take_threads_of(request["golden"])
        answer = replay(**request)
    except Exception as error:  # whatever keeps a server from loading the model is the result
        answer = {"failed": f"{type(error).__name__}: {error}"}
    answer["imported"] = [name for name in BLOCKED if sys.modules.get(name) is not None]
    print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
