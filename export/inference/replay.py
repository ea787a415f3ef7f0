"""Runs a SavedModel on a stored sample, and compares its outputs with the stored ones.

An `Ask` runs it, in the clean process of an export's proof (validate.py) or in this one (`answer_here`).
"""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable, Collection, Mapping
from typing import Any

ROWS, ANSWERS, THREADS = "rows:", "answers:", "threads"  # in golden.npz
_MARKED = "with a dot at the end"

DEFAULT = "serving_default"  # the signature that clients call by default

# (signature -> rows, or {} to only load; threads of one op, None: all cores)
# -> (signature -> outputs; stage -> seconds)
Ask = Callable[[Mapping[str, Mapping[str, Any]], int | None], tuple[dict[str, dict[str, Any]], dict[str, float]]]


def texts(array: Any) -> Any:
    """Converts strings or bytes to an array of `bytes` objects; strings become UTF-8."""
    import numpy as np

    objects = np.asarray(array, object)
    flat = [each if isinstance(each, bytes) else str(each).encode() for each in objects.reshape(-1)]
    result = np.empty(len(flat), object)
    result[:] = flat
    return result.reshape(objects.shape)


def storable(array: Any) -> Any:
    """Converts an array to one that .npz stores without pickle: bytes for strings, float32 for bfloat16 (exact).

    NumPy's arrays of bytes drop zeros at the end of an element. If an element ends with zeros, a dot is appended to all
    elements, which `restored` removes.
    """
    import numpy as np

    array = np.asarray(array)
    if array.dtype.names:
        return array
    if array.dtype.kind in "OSU":
        strings = texts(array)
        if not any(each.endswith(b"\0") for each in strings.flat):
            return strings.astype("S")
        marked = np.array([each + b"." for each in strings.flat], "S").reshape(strings.shape)
        return marked.view([(_MARKED, marked.dtype)])
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def restored(array: Any) -> Any:
    """Reverses `storable`, except that strings stay bytes and bfloat16 stays float32."""
    if not array.dtype.names:
        return array
    return texts([each[:-1] for each in array[_MARKED].reshape(-1).tolist()]).reshape(array.shape)


def save(file: Any, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by name to an .npz file. Unlike numpy.savez it allows any name, even "file"."""
    import numpy as np

    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def kernel_threads() -> int:
    """Returns the number of threads for one op: set by the program or the environment, else all cores.

    Matrix products split their sums by this number, so the last bits of results depend on it.
    """
    import tensorflow as tf

    stated = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    chosen = tf.config.threading.get_intra_op_parallelism_threads() or (int(stated) if stated.isdecimal() else 0)
    return chosen or len(os.sched_getaffinity(0))


def compare(golden: Mapping[str, Any], answers: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    """Compares outputs by name.

    Strings and integers must be equal. Floats may differ by `tolerance`, relative to max(1, largest |golden|) of the
    output. NaN equals NaN.
    Returns: bitwise (bool), largest (relative difference), problems (sentences).
    """
    import numpy as np

    problems, bitwise, largest = [], True, 0.0
    if set(golden) != set(answers):
        problems.append(f"outputs are {sorted(answers)}, not {sorted(golden)}")
    for name in sorted(set(golden) & set(answers)):
        expected, received = (restored(storable(each[name])) for each in (golden, answers))
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


def source(signature: str, name: str) -> str:
    """Returns the key of a function signature's output among the golden outputs, or of its own input among the rows.

    No layer or input of a model can have such a key as its name.
    """
    return f"{signature}/{name}"


def rows_of(signature: str, rows: Mapping[str, Any], own: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Returns the rows that a signature takes, by the names of its inputs.

    Args:
        own: signature -> names of its own inputs; empty if an export has replaced it by one with the model's inputs.
    """
    if own.get(signature):
        return {name: rows[source(signature, name)] for name in own[signature]}
    other_prefixes = tuple(source(each, "") for each in own)
    return {name: row for name, row in rows.items() if not name.startswith(other_prefixes)}


def load_rows(file: str, prefix: str = "") -> dict[str, Any]:
    """Returns name -> array of an .npz file, for names that begin with `prefix`, which is removed.

    Raises: OSError, EOFError, ValueError, BadZipFile: the file is missing, or not an .npz file.
    """
    import numpy as np

    archive = np.load(file)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{file} holds one array, without a name")
    with archive:
        return {name.removeprefix(prefix): restored(archive[name]) for name in archive.files if name.startswith(prefix)}


def replay(
    ask: Ask,
    sample: str | None,
    golden: str | None,
    skip: list[str],
    tolerance: float,
    signatures: Mapping[str, Mapping[str, str] | None],
    images: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Collection[str]],
) -> dict[str, Any]:
    """Runs signatures on the sample and compares with the golden outputs, except those in `skip`.

    Args:
        sample: .npz of input name -> rows; used when there is no `golden`.
        golden: .npz of rows (names begin with ROWS), their outputs in training (ANSWERS), and the number of threads
            that computed the outputs (THREADS).
        signatures: signature -> {output: its golden name}; None instead of a mapping: equal names, all outputs.
        images: signatures that take encoded images -> "argument", the model's "input" that they decode to, its "size"
            and "channels". These signatures run on files of made-up pixels.
        own: as in `rows_of`.
    Returns: as `compare`, and rows, outputs (names), asked (signatures), compared (golden names), threads, seconds (to
        load and to answer).
    """
    import numpy as np

    threads = None
    questions: dict[str, Mapping[str, Any]] = {}
    rows = None
    if golden is not None:
        rows = load_rows(golden, ROWS)
        with np.load(golden) as archive:
            threads = int(archive[THREADS]) if THREADS in archive.files else None
    elif sample is not None:
        rows = load_rows(sample)
    if rows is not None:
        questions = {name: rows_of(name, rows, own) for name in signatures}
        questions |= {name: _with_files(rows_of(name, rows, own), each) for name, each in images.items()}
    answers, seconds = ask(questions, threads)
    result: dict[str, Any] = {"bitwise": golden is not None, "largest": 0.0, "problems": [], "compared": []}
    if golden is not None:
        expected = {name: each for name, each in load_rows(golden, ANSWERS).items() if name not in skip}
        for name, sources in signatures.items():
            comparison = _compare_known(expected, answers[name], sources, skip, tolerance)
            result["compared"] = sorted({*result["compared"], *comparison["compared"]})
            result["bitwise"] &= comparison["bitwise"]
            result["largest"] = max(result["largest"], comparison["largest"])
            where = "" if name == DEFAULT else f"signature {name}: "
            result["problems"] += [where + problem for problem in comparison["problems"]]
        result["bitwise"] &= not result["problems"]
    model_rows = rows_of(DEFAULT, rows or {}, own)
    result["rows"] = max((len(row) for row in model_rows.values() if row.ndim), default=1 if rows else 0)
    result |= {"outputs": sorted(answers.get(DEFAULT, {})), "asked": sorted(answers)}
    return {**result, "threads": threads or kernel_threads(), "seconds": seconds}


def _compare_known(
    expected: Mapping[str, Any],
    answers: Mapping[str, Any],
    sources: Mapping[str, str] | None,
    skip: list[str],
    tolerance: float,
) -> dict[str, Any]:
    """Compares the outputs of a signature that have golden counterparts."""
    if sources is None:
        known = {name: answer for name, answer in answers.items() if name not in skip}
        return {**compare(expected, known, tolerance), "compared": list(expected)}
    # All others are random, or were not stored in training.
    stored = {name: source for name, source in sources.items() if source in expected}
    known = {name: answer for name, answer in answers.items() if name in stored or name not in sources}
    comparison = compare({name: expected[source] for name, source in stored.items()}, known, tolerance)
    return {**comparison, "compared": list(stored.values())}


def _with_files(rows: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces an image input among the rows by files of different sizes: PNG, and JPEG if there is no alpha."""
    import numpy as np
    import tensorflow as tf

    random, files = np.random.default_rng(7), []
    for i in range(len(rows[images["input"]])):
        height, width = (size + i % 3 for size in images["size"])
        pixels = random.integers(0, 256, (height, width, images["channels"]), dtype=np.uint8)
        encode = tf.io.encode_jpeg if i % 2 and images["channels"] < 4 else tf.io.encode_png
        files.append(encode(pixels).numpy())
    others = {name: row for name, row in rows.items() if name != images["input"]}
    return {**others, images["argument"]: np.array(files, dtype=object)}


def answer_here(path: str) -> Ask:
    """Returns an `Ask` that loads `path` into this process and runs it with this process's threads."""

    def ask(
        questions: Mapping[str, Mapping[str, Any]], threads: int | None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        import tensorflow as tf

        start = time.perf_counter()
        served = tf.saved_model.load(path)  # kept, because signatures do not keep the variables alive
        loaded = time.perf_counter()
        answers: dict[str, dict[str, Any]] = {}
        for name, rows in questions.items():
            function = served.signatures[name]
            specs = function.structured_input_signature[1]
            refuse_other_names(rows, specs)
            feed = {each: tf.cast(tf.constant(row), specs[each].dtype) for each, row in rows.items()}
            answers[name] = {each: tensor.numpy() for each, tensor in function(**feed).items()}
        return answers, {"load": loaded - start, "answer": time.perf_counter() - loaded}

    return ask


def refuse_other_names(rows: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raises: ValueError: the sample's names differ from those of the inputs."""
    if set(rows) != set(inputs):
        raise ValueError(f"the sample holds {sorted(rows)}, the graph takes {sorted(inputs)}")
