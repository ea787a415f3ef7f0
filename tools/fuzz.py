"""Compares random collectives in random orders with NumPy, from a seed: in tests, or overnight.

    keras-ddl run -np 4 python tools/fuzz.py --seconds 600
    keras-ddl run -np 4 python tools/fuzz.py --seed 17 --first-round 12 --rounds 1   # a failure prints it

A round is a plan that every rank draws from (seed, round): about a dozen calls of random kind, dtype, op, count, name
and root, over all ranks or within a row or column of ranks. In some calls one rank deviates. The ranks run the plan in
one of three ways: in order on the main thread; divided between a few threads; or every call on its own thread, started
in a different order on each rank. Before some calls a rank sleeps. Every result must equal NumPy's, and every deviation
must raise the same error on every rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import keras_ddl
from keras_ddl import communicator, errors

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "int8")
OPS = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod, "mean": np.mean}
COUNTS = (0, 1, 2, 3, 5, 31, 64, 127, 1000, 4099, 65_537, 300_007)
ARRAY_KINDS = (
    "all_reduce_array",
    "all_reduce_in_place",
    "all_reduce_init",
    "broadcast_array",
    "all_gather_object",
    "barrier",
)
TENSOR_KINDS = ("all_reduce", "all_reduce_n", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
DEVIATIONS = ("count", "dtype", "op", "root", "kind")


@dataclass(frozen=True)
class Call:
    """One collective of a plan, equal on all ranks; each row or column runs its own."""

    group: int  # 0: all ranks, 1: rows, 2: columns
    kind: str
    name: str
    dtype: str
    op: str
    count: int
    root: int  # taken modulo the size of the group, like `deviant`
    seed: int
    thread: int
    deviation: str  # "" for none
    deviant: int

    def inputs(self, size: int) -> list[np.ndarray]:
        """Returns each rank's array of small integers, so that every result is exact in every dtype and order."""
        rng = np.random.default_rng(self.seed)
        choices = {"product": [1, 2] if self.dtype == "uint8" else [-1, 1, 2]}.get(self.op, [0, 1, 2, 3])
        scale = size if self.op == "mean" else 1
        return [(rng.choice(choices, self.count) * scale).astype(numpy_dtype(self.dtype)) for _ in range(size)]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make_plan(seed: int, number: int, size: int, kinds: tuple[str, ...], threads: int) -> list[Call]:
    rng = np.random.default_rng([seed, number])
    plan = []
    for index in range(int(rng.integers(1, 40))):
        kind, thread = str(rng.choice(kinds)), int(rng.integers(threads))
        # Ranks match calls of one name in order, which only a single thread guarantees.
        name = f"shared {thread}" if rng.random() < 0.3 else f"call {index}"
        deviation = str(rng.choice(DEVIATIONS)) if rng.random() < 0.08 and size > 1 else ""
        plan.append(
            Call(
                group=int(rng.choice(3, p=[0.5, 0.25, 0.25])),
                kind=kind,
                name=name,
                dtype=str(rng.choice(DTYPES)),
                op=str(rng.choice(list(OPS))),
                count=int(rng.choice(COUNTS, p=_weights())),
                root=int(rng.integers(size)),
                seed=int(rng.integers(1 << 31)),
                thread=thread,
                deviation=deviation if _can_deviate(kind, deviation) else "",
                deviant=int(rng.integers(size)),
            )
        )
    return plan


def _weights() -> list[float]:
    weights = np.array([4.0 if count < 1001 else 1.0 for count in COUNTS])
    return (weights / weights.sum()).tolist()


def _can_deviate(kind: str, deviation: str) -> bool:
    if kind in ("barrier", "all_gather_object"):
        return False
    reduces = kind.startswith(("all_reduce", "reduce_scatter"))
    return {
        "count": kind not in ("all_gather", "all_to_all"),
        "op": reduces,
        "root": kind.startswith("broadcast"),
        # Names of calls on arrays begin with the kind, so another kind means another name, not a mismatch.
        "kind": kind in ("all_reduce", "broadcast"),
    }.get(deviation, True)


class Runner:
    """Runs calls within one group of this rank."""

    def __init__(self, comm: keras_ddl.Communicator | None) -> None:
        self.comm = comm
        self.rank, self.size = (comm or keras_ddl.topology()).rank, (comm or keras_ddl.topology()).size

    def check(self, call: Call) -> str:
        """Runs one call and compares the result. Returns the text of a planned mismatch."""
        call = replace(call, root=call.root % self.size, deviant=call.deviant % self.size)
        if self.size == 1:
            call = replace(call, deviation="")
        if not call.deviation:
            self._check_values(call)
            return ""
        try:
            self._run(self._deviate(call) if self.rank == call.deviant else call)
        except errors.RankMismatchError as error:
            return str(error)
        raise AssertionError(f"rank {self.rank}: no error although rank {call.deviant} deviated in {call.deviation}")

    def _deviate(self, call: Call) -> Call:
        changes: dict[str, Any] = {
            "count": {"count": call.count + 1},
            "dtype": {"dtype": "float32" if call.dtype != "float32" else "int32"},
            "op": {"op": "sum" if call.op != "sum" else "max"},
            "root": {"root": (call.root + 1) % self.size},
            "kind": {"kind": "broadcast" if call.kind == "all_reduce" else "all_reduce"},
        }
        return replace(call, **changes[call.deviation])

    def _check_values(self, call: Call) -> None:
        actual = self._run(call)
        expected = self._expected(call)
        if call.kind == "all_gather_object":
            assert actual == expected, (actual, expected)
        elif expected is not None:
            for got, want in zip(actual, expected, strict=True):
                assert got.dtype == want.dtype, (got.dtype, want.dtype)
                np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))

    def _expected(self, call: Call) -> Any:
        inputs = call.inputs(self.size)
        wide = np.stack(inputs).astype(np.float64 if "float" in call.dtype else np.int64)
        reduced = OPS[call.op](wide, axis=0).astype(np.int64).astype(numpy_dtype(call.dtype))
        if call.kind == "barrier":
            return None
        if call.kind == "all_gather_object":
            return [(rank, call.seed) for rank in range(self.size)]
        if call.kind.startswith("broadcast"):
            return [inputs[call.root]]
        if call.kind == "all_gather":
            return [np.concatenate([array[: self._rows(call, rank)] for rank, array in enumerate(inputs)])]
        if call.kind == "all_to_all":
            parts = []
            for rank, array in enumerate(inputs):
                splits = self._splits(call, rank)
                parts.append(array[splits[: self.rank].sum() :][: splits[self.rank]])
            return [np.concatenate(parts)]
        if call.kind == "reduce_scatter":
            first = self.rank * (call.count // self.size) + min(self.rank, call.count % self.size)
            return [reduced[first : first + call.count // self.size + (self.rank < call.count % self.size)]]
        return [reduced, reduced[:3]] if call.kind == "all_reduce_n" else [reduced]

    @staticmethod
    def _rows(call: Call, rank: int) -> int:
        return call.count - min(call.count, rank * 3)

    def _splits(self, call: Call, rank: int) -> np.ndarray:
        return np.random.default_rng([call.seed, rank]).multinomial(call.count, [1 / self.size] * self.size)

    def _run(self, call: Call) -> Any:
        array = call.inputs(self.size)[self.rank]
        before = array.copy()
        result = self._call(call, array)
        if call.kind != "all_reduce_in_place":
            np.testing.assert_array_equal(array.view(np.uint8), before.view(np.uint8), err_msg="an input was changed")
        return result

    def _call(self, call: Call, array: np.ndarray) -> Any:
        if call.kind == "barrier":
            return communicator.barrier(call.name, comm=self.comm)
        if call.kind == "all_gather_object":
            return communicator.all_gather_object((self.rank, call.seed), call.name, comm=self.comm)
        if call.kind == "broadcast_array":
            return [communicator.broadcast_array(array, call.root, call.name, comm=self.comm)]
        if call.kind == "all_reduce_array":
            return [communicator.all_reduce_array(array, call.op, call.name, comm=self.comm)]
        if call.kind == "all_reduce_in_place":
            return [communicator.all_reduce_array(array, call.op, call.name, out=array, comm=self.comm)]
        if call.kind == "all_reduce_init":
            persistent = communicator.all_reduce_init(
                array, call.op, call.name, out=np.empty_like(array), comm=self.comm
            )
            persistent()
            return [persistent()]
        from keras_ddl import ops
        from keras_ddl.compat.tensorflow import tf

        tensor = tf.constant(array)
        common = {"name": call.name, "comm": self.comm}
        if call.kind == "all_reduce":
            results = [ops.all_reduce(tensor, op=call.op, **common)]
        elif call.kind == "all_reduce_n":
            results = ops.all_reduce_n([tensor, tensor[:3]], op=call.op, **common)
        elif call.kind == "reduce_scatter":
            results = [ops.reduce_scatter(tensor, op=call.op, **common)]
        elif call.kind == "broadcast":
            results = [ops.broadcast(tensor, call.root, **common)]
        elif call.kind == "all_to_all":
            results = [ops.all_to_all(tensor, self._splits(call, self.rank), **common)[0]]
        else:
            results = [ops.all_gather(tensor[: self._rows(call, self.rank)], **common)]
        return [result.numpy() for result in results]


def run_round(runners: list[Runner], seed: int, number: int, kinds: tuple[str, ...]) -> int:
    """Runs one plan. Returns its number of calls."""
    rng = np.random.default_rng([seed, number, 1])
    style = str(rng.choice(["in order", "threads", "shuffled"]))
    threads = {"in order": 1, "threads": int(rng.integers(2, 6)), "shuffled": 1}[style]
    plan = make_plan(seed, number, runners[0].size, kinds, threads)
    mine = np.random.default_rng([seed, number, 2, runners[0].rank])  # for choices that differ between ranks
    delays = np.where(mine.random(len(plan)) < 0.1, mine.random(len(plan)) * 0.003, 0.0)

    def run(indices: list[int]) -> list[tuple[int, str]]:
        texts = []
        for index in indices:
            if delays[index]:
                time.sleep(delays[index])
            try:
                texts.append((index, runners[plan[index].group].check(plan[index])))
            except Exception as error:
                raise AssertionError(f"{style}, call {index}: {plan[index]}: {error}") from error
        return texts

    if style == "in order":
        texts = run(list(range(len(plan))))
    else:
        parts = [[index for index, call in enumerate(plan) if call.thread == thread] for thread in range(threads)]
        if style == "shuffled":
            # Calls of one name stay in order on one thread; all others go to any thread.
            by_name: dict[tuple[int, str], list[int]] = {}
            for index, call in enumerate(plan):
                by_name.setdefault((call.group, call.name), []).append(index)
            parts = list(by_name.values())
            mine.shuffle(parts)
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            texts = [text for part in pool.map(run, parts) for text in part]
    for group, runner in enumerate(runners):
        mine_here = sorted(text for text in texts if plan[text[0]].group == group)
        everyone = communicator.all_gather_object(mine_here, name="fuzz/messages", comm=runner.comm)
        assert all(other == everyone[0] for other in everyone), f"the messages differ between ranks: {everyone}"
    return len(plan)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock of rank 0")
    parser.add_argument("--seconds", type=float, default=10.0, help="stop after the round in which this time ends")
    parser.add_argument("--rounds", type=int, default=0, help="stop after this number of rounds (0: by --seconds)")
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--no-tensorflow", action="store_true", help="NumPy arrays and objects only")
    options = parser.parse_args(arguments)
    os.environ.setdefault("KERAS_DDL_DEADLINE_SECONDS", "60")
    keras_ddl.init()
    start = time.monotonic()
    seed = communicator.broadcast_object(options.seed if options.seed is not None else time.time_ns() % 1_000_000)
    kinds = ARRAY_KINDS if options.no_tensorflow else ARRAY_KINDS + TENSOR_KINDS
    width = max(1, keras_ddl.size() // 2)
    row, column = keras_ddl.rank() // width, keras_ddl.rank() % width
    comms = [None, keras_ddl.split(row, name="row"), keras_ddl.split(column, key=-row, name="column")]
    runners, number, calls = [Runner(comm) for comm in comms], options.first_round, 0
    while True:
        try:
            calls += run_round(runners, seed, number, kinds)
        except BaseException:
            print(
                f"fuzz: rank {keras_ddl.rank()} of {keras_ddl.size()} failed in round {number}. Run it again with\n"
                f"  keras-ddl run -np {keras_ddl.size()} python {sys.argv[0]} --seed {seed} --first-round {number} "
                f"--rounds 1{' --no-tensorflow' * options.no_tensorflow}",
                file=sys.stderr,
                flush=True,
            )
            raise
        number += 1
        rounds = number - options.first_round
        over = rounds >= options.rounds if options.rounds else time.monotonic() - start > options.seconds
        if communicator.broadcast_object(over, name="fuzz/over"):
            break
    if keras_ddl.rank() == 0:
        print(f"fuzz: seed {seed}: {rounds} rounds, {calls} calls, {keras_ddl.size()} ranks: results equal NumPy's")


if __name__ == "__main__":
    main()
