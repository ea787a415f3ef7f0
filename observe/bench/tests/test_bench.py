"""keras-ddl bench: standalone and as ranks of a job, its arithmetic, and that a wrong result fails."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_ddl.bench import all_reduce as bench
from launch.launching import environment, run

QUICK = ["-n", "2", "-w", "1"]


@pytest.mark.parallel
def test_bench_starts_ranks_and_saves_its_output(tmp_path: Path) -> None:
    ended = run(["bench", "-np", "2", "-b", "100", "-e", "64K", "-f", "16", *QUICK, "--json", "out.json"], tmp_path)
    assert ended.status == 0, ended
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["ranks"], content["dtype"], content["op"]) == (2, "float32", "sum")
    assert [row["bytes"] for row in content["rows"]] == [100, 1600, 25600]
    for row in content["rows"]:
        assert f"{row['bytes']:>12} {row['bytes'] // 4:>12} |" in ended.out
        assert row["wrong"] == 0
        for name in ("keras_ddl", "mpi"):
            assert row[name]["algbw"] == pytest.approx(row["bytes"] / row[name]["seconds"])
            assert row[name]["busbw"] == pytest.approx(row[name]["algbw"])  # 2 (n-1)/n is 1 for two ranks


@pytest.mark.parallel
@pytest.mark.parametrize("dtype, op", [("bfloat16", "mean"), ("int8", "product")])
def test_bench_runs_as_ranks_of_a_job(dtype: str, op: str, tmp_path: Path) -> None:
    words = ["run", "-np", "3", "keras-ddl", "bench", "-e", "4K", "-d", dtype, "-o", op, "--no-mpi", *QUICK]
    ended = run(words, tmp_path)
    assert ended.status == 0, ended
    assert f"# all_reduce, {dtype} {op}, 3 rank(s) on 1 host(s)" in ended.out
    rows = [line for line in ended.out.splitlines() if line.lstrip()[:1].isdigit()]
    assert [line.split()[0] for line in rows] == ["1024", "4096"], ended
    assert all(line.endswith("0") for line in rows)


@pytest.mark.parallel
def test_bench_inside_a_job_starts_no_ranks(tmp_path: Path) -> None:
    ended = run(["run", "-np", "2", "keras-ddl", "bench", "-np", "2"], tmp_path)
    assert ended.status == 2 and "start ranks, but this process is a rank" in ended.err, ended


def test_bench_fails_when_a_result_is_wrong(tmp_path: Path) -> None:
    code = """
import keras_ddl.cli, keras_ddl.bench.all_reduce as bench
right = bench.all_reduce_array
def wrong(array, *rest, out):
    right(array, *rest, out=out)
    out[100] += 1
bench.all_reduce_array = wrong
keras_ddl.cli.main(["bench", "-e", "4K", "-n", "1"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment("-", tmp_path, None)
    )
    assert done.returncode == 1, done
    assert "2 elements differ" in done.stderr  # one in each of two sizes


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-b", "2M", "-e", "1M"], "-b must not be above -e"),
        (["-b", "lots"], "is not a number of bytes"),
        (["-d", "float8"], "is not one of"),
        (["-f", "1"], "not in the range x>1"),
    ],
)
def test_bench_mistakes_are_reported_before_anything_starts(arguments: list[str], message: str, tmp_path: Path) -> None:
    ended = run(["bench", *arguments], tmp_path)
    assert ended.status == 2 and message in ended.err, ended


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int64", "uint8"])
def test_expected_equals_the_reduced_patterns(name: str, op: str, size: int) -> None:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    dtype = bench.element_type(name)
    parts = [bench.pattern(rank, op, dtype).astype(np.int64).tolist() for rank in range(size)]
    reduce = {"sum": sum, "mean": sum, "min": min, "max": max, "product": math.prod}[op]
    want = [reduce(values) for values in zip(*parts)]
    if op == "mean":
        want = [total // size if name in ("int64", "uint8") else total / size for total in want]
    if name == "uint8":
        want = [value % 256 for value in want]  # 255, the -1 of a byte, wraps in a product
    found = bench.expected(size, op, dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(want).astype(dtype))
    assert bench.wrong_elements(np.resize(found, 1000), found, op) == 0


@pytest.mark.parametrize("op", ["sum", "mean", "min", "product"])
def test_wrong_elements_finds_shifts_and_nan(op: str) -> None:
    right = np.resize(bench.expected(2, op, np.dtype("float32")), 4096)
    shifted = np.concatenate([right[1024:], right[:1024]])
    assert bench.wrong_elements(shifted, bench.expected(2, op, right.dtype), op) > 1000
    right[7] = np.nan
    assert bench.wrong_elements(right, bench.expected(2, op, right.dtype), op) == 1


def test_bus_bandwidth_follows_the_ring_formula() -> None:
    assert bench.bus_bandwidth(1e9, 1.0, 4) == pytest.approx(1.5e9)
    assert bench.bus_bandwidth(1e9, 1.0, 1) == 0.0


def test_sizes_end_at_the_limit() -> None:
    assert bench.sizes(1000, 4000, 2) == [1000, 2000, 4000]
    assert bench.sizes(1024, 1024, 4) == [1024]
