"""Measures all_reduce and MPI_Allreduce on the ranks of `keras-ddl bench`, and checks results against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import keras_ddl
from keras_ddl.bench.rounds import interleave
from keras_ddl.communicator import all_reduce_array
from keras_ddl.communicator.transports import mpi as mpi_module

# Turns of each contestant per size; their median is reported.
ROUNDS = 5
# Prime, so that misplaced chunks are detected: chunks are powers of two.
_PERIOD = 251
_MPI_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        nbytes, count: size of one rank's buffer, in bytes and in elements.
        seconds: time of one keras_ddl all_reduce on the slowest rank, median of the rounds.
        mpi_seconds: time of one MPI_Allreduce, None if not measured.
        wrong: elements that differ from NumPy's result, over all ranks; None if not checked.
    """

    nbytes: int
    count: int
    seconds: float
    mpi_seconds: float | None
    wrong: int | None


def algorithm_bandwidth(nbytes: float, seconds: float) -> float:
    """Bytes/s of one rank's buffer: nbytes / seconds (algbw)."""
    return nbytes / seconds


def bus_bandwidth(nbytes: float, seconds: float, size: int) -> float:
    """Bytes/s over each rank's link if they formed a ring: algbw 2 (size-1)/size, as nccl-tests defines busbw.

    It can be compared between numbers of ranks and with the link's own speed. One rank sends nothing, so it has 0.
    """
    return algorithm_bandwidth(nbytes, seconds) * 2 * (size - 1) / size


def sizes(begin: int, end: int, factor: float) -> list[int]:
    """Returns begin, begin * factor, ... up to `end`; factor must be above 1."""
    result = []
    size: float = begin
    while size <= end:
        result.append(int(size))
        size *= factor
    return result


def element_type(name: str) -> np.dtype:
    """Returns the NumPy dtype; bfloat16 is that of ml_dtypes, which comes with TensorFlow."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def pattern(rank: int, op: str, dtype: np.dtype) -> np.ndarray:
    """Returns the first period of a rank's input: small integers, whose sums are exact in every dtype."""
    draw = np.random.default_rng(rank).integers
    values = 1 - 2 * draw(2, size=_PERIOD) if op == "product" else draw(4, size=_PERIOD)
    return values.astype(dtype)


def expected(size: int, op: str, dtype: np.dtype) -> np.ndarray:
    """Returns the first period of the reduction of all ranks' patterns, by NumPy."""
    wide = np.stack([pattern(rank, op, dtype) for rank in range(size)])
    integer = np.issubdtype(dtype, np.integer)
    wide = wide.astype(np.int64 if integer else np.float64)
    reductions: dict[str, Callable[..., Any]] = {"min": np.min, "max": np.max, "product": np.prod}
    reduce = reductions.get(op, np.sum)
    result = reduce(wide, axis=0)
    if op == "mean":
        result = result // size if integer else result / size
    return result.astype(dtype)


def wrong_elements(result: np.ndarray, period: np.ndarray, op: str) -> int:
    """Returns how many elements of `result` differ from the repeated `period`; a mean may be off by one ulp."""
    want = np.resize(period, result.shape)
    if op != "mean" or np.issubdtype(result.dtype, np.integer):
        return int(np.count_nonzero(result != want))
    epsilon = 2.0 ** -{"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[result.dtype.name]
    result, want = result.astype(np.float64), want.astype(np.float64)
    # Written so that a NaN counts as wrong.
    return int(np.count_nonzero(~(np.abs(result - want) <= 2 * epsilon * np.abs(want))))


def measure(nbytes: int, dtype: np.dtype, op: str, *, iterations: int, warmup: int, mpi: bool, check: bool) -> Row:
    """Measures one size. COLLECTIVE.

    Args:
        nbytes: size of one rank's buffer; rounded down to whole elements, at least one.
        iterations: calls of each contestant, spread over the rounds.
        warmup: warm-up calls.
        mpi: measure MPI_Allreduce too, if MPI has the dtype.
        check: compare the result with NumPy's.
    """
    rank, size = keras_ddl.rank(), keras_ddl.size()
    count = max(1, nbytes // dtype.itemsize)
    source = np.resize(pattern(rank, op, dtype), count)
    result = np.zeros_like(source)
    contestants: dict[str, Callable[[], Any]] = {
        "keras_ddl": lambda: all_reduce_array(source, op, "bench", out=result),
    }
    if mpi and mpi_module.running() and dtype.name not in ("float16", "bfloat16"):
        from mpi4py import MPI

        mpi_op, other = getattr(MPI, _MPI_OPS[op]), np.zeros_like(source)
        contestants["MPI"] = lambda: MPI.COMM_WORLD.Allreduce(source, other, mpi_op)
    rounds = min(ROUNDS, iterations)
    seconds = interleave(contestants, rounds, max(1, iterations // rounds), warmup)
    wrong = None
    if check:
        result.fill(0)
        contestants["keras_ddl"]()
        wrong = sum(keras_ddl.all_gather_object(wrong_elements(result, expected(size, op, dtype), op)))
    return Row(source.nbytes, count, seconds["keras_ddl"], seconds.get("MPI"), wrong)


def table(rows: Iterator[Row], size: int) -> Iterator[str]:
    """Yields the lines of the table, each row as soon as it is measured."""
    yield f"{'':>12} {'':>12} | {'keras_ddl':^29} | {'MPI_Allreduce':^29} |"
    columns = f"{'time':>10} {'algbw':>9} {'busbw':>8}"
    yield f"{'bytes':>12} {'elements':>12} | {columns} | {columns} | {'MPI/ours':>8} {'wrong':>7}"
    units = f"{'us':>10} {'GB/s':>9} {'GB/s':>8}"
    yield f"{'':>12} {'':>12} | {units} | {units} |"
    for row in rows:
        mpi = f"{'-':>10} {'-':>9} {'-':>8}" if row.mpi_seconds is None else _columns(row.nbytes, row.mpi_seconds, size)
        ratio = "-" if row.mpi_seconds is None else f"{row.mpi_seconds / row.seconds:.2f}"
        wrong = "-" if row.wrong is None else str(row.wrong)
        ours = _columns(row.nbytes, row.seconds, size)
        yield f"{row.nbytes:>12} {row.count:>12} | {ours} | {mpi} | {ratio:>8} {wrong:>7}"


def _columns(nbytes: int, seconds: float, size: int) -> str:
    speeds = algorithm_bandwidth(nbytes, seconds), bus_bandwidth(nbytes, seconds, size)
    return f"{seconds * 1e6:>10.1f} {speeds[0] / 1e9:>9.3f} {speeds[1] / 1e9:>8.3f}"


def as_json(rows: list[Row], size: int) -> list[dict[str, Any]]:
    """Returns the rows for a file: seconds, and bandwidths in bytes/s."""
    result = []
    for row in rows:
        entry: dict[str, Any] = {"bytes": row.nbytes, "count": row.count, "wrong": row.wrong}
        for name, seconds in (("keras_ddl", row.seconds), ("mpi", row.mpi_seconds)):
            entry[name] = seconds and {
                "seconds": seconds,
                "algbw": algorithm_bandwidth(row.nbytes, seconds),
                "busbw": bus_bandwidth(row.nbytes, seconds, size),
            }
        result.append(entry)
    return result


def plot(rows: list[Row], size: int, file: str, title: str) -> None:
    """Draws busbw over the size. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 4))
    for label, attribute in (("keras_ddl", "seconds"), ("MPI_Allreduce", "mpi_seconds")):
        points = [(row.nbytes, seconds) for row in rows if (seconds := getattr(row, attribute))]
        if points:
            speeds = [bus_bandwidth(nbytes, seconds, size) / 1e9 for nbytes, seconds in points]
            axes.plot([nbytes for nbytes, _ in points], speeds, marker="o", label=label)
    axes.set(xlabel="bytes of one rank's buffer", ylabel="busbw, GB/s", title=title)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend()
    pyplot.savefig(file, bbox_inches="tight")
