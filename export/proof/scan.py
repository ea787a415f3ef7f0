"""Scans a SavedModel's graph for parts that no server runs: custom ops, Python callbacks, communication, GPU devices.

It reads the protocol buffer only and loads no graph, so it is safe on any file. Ops are compared with a fixed list
(allowed_ops.txt, made by tools/generate_allowed_ops.py): the op registry of a training process contains keras_ddl's own
ops and would let them pass.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.files import foreign, version_directories

_CALLS_PYTHON = re.compile(r"^(Eager)?PyFunc(Stateless)?$")
_CALLS_RANKS = re.compile(r"^_?(Ddl|Collective|Nccl|Horovod)")
_CPU = re.compile(r"^(/job:localhost)?(/replica:0)?(/task:0)?(/device:CPU:(\d+|\*)|/cpu:\d+)?$", re.IGNORECASE)
_MOST = 12  # nodes named in one message; an unwanted op often occurs in hundreds


@dataclass(frozen=True)
class ScanReport:
    """`ops`: op -> number of nodes. `problems`: why it cannot be served. `warnings`: what a server may lack."""

    ops: dict[str, int]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def raise_for_problems(self, what: str) -> None:
        """Raises: ExportError: the graph cannot be served; lists the nodes."""
        if not self.problems:
            return
        listed = "\n  ".join(self.problems[:_MOST])
        more = f"\n  and {len(self.problems) - _MOST} more" if len(self.problems) > _MOST else ""
        raise ExportError(
            f"A server runs only TensorFlow's own ops, without fixed devices. Received: {what} with\n  {listed}{more}\n"
            f"Take these out of call(training=False): communicate only in training, write Python functions as "
            f"TensorFlow ops, and name no GPU in the model."
        )


@functools.cache
def allowed_ops() -> dict[str, bool]:
    """Returns op -> whether it has a CPU kernel, from allowed_ops.txt."""
    lines = Path(__file__).with_name("allowed_ops.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {row[0]: len(row) == 1 for row in rows}


def scan_saved_model(path: str | Path, allow_ops: Iterable[str] = ()) -> ScanReport:
    """Scans `path`/saved_model.pb.

    Args:
        allow_ops: custom ops that the server is known to have (tensorflow_text's, for one).
    Raises: ExportError: the file is missing, or not a SavedModel.
    """
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf import saved_model_pb2

    file = Path(path) / "saved_model.pb"
    try:
        foreign.check_opens(file)
        return scan_proto(saved_model_pb2.SavedModel.FromString(file.read_bytes()), allow_ops)
    except (OSError, DecodeError) as error:
        entries = list(Path(path).iterdir()) if Path(path).is_dir() else []
        versions = [each for each in entries if version_directories.number_of(each.name) is not None and each.is_dir()]
        highest = max(versions, key=lambda each: int(each.name), default=None)
        remedy = "" if highest is None else f" Give one of its versions: {highest}."
        raise ExportError(
            f"A SavedModel directory must hold saved_model.pb. Received: {file}: {error}.{remedy}"
        ) from error


def scan_proto(saved_model: Any, allow_ops: Iterable[str] = ()) -> ScanReport:
    """Scans a SavedModel protocol buffer: main graphs, function bodies, devices, and the list of stripped ops."""
    known = allowed_ops()
    extra = set(allow_ops)
    ops: Counter[str] = Counter()
    problems: dict[str, None] = {}
    warnings: dict[str, None] = {}
    for graph in saved_model.meta_graphs:
        functions = {function.signature.name for function in graph.graph_def.library.function}
        for place, node in _nodes(graph.graph_def):
            if node.op in functions:
                continue
            ops[node.op] += 1
            problem = _problem(node, known, extra)
            if problem:
                problems[f"{problem} (node {node.name!r} in {place})"] = None
            elif not known.get(node.op, True):
                warnings[f"{node.op} runs only on a GPU (node {node.name!r} in {place})"] = None
            if node.attr["_XlaMustCompile"].b if "_XlaMustCompile" in node.attr else False:
                warnings[f"jit_compile=True: the server must be built with XLA (node {node.name!r} in {place})"] = None
        for op in graph.meta_info_def.stripped_op_list.op:
            if op.name not in known and op.name not in extra and op.name not in ops:
                problems[f"{_kind(op.name)} {op.name} (named in the list of stripped ops)"] = None
    return ScanReport(dict(sorted(ops.items())), tuple(problems), tuple(warnings))


def _problem(node: Any, known: dict[str, bool], extra: set[str]) -> str | None:
    if _CALLS_PYTHON.match(node.op) or _CALLS_RANKS.match(node.op):
        return f"{_kind(node.op)} {node.op}"
    if node.op not in known and node.op not in extra:
        return f"{_kind(node.op)} {node.op}"
    if not _CPU.match(node.device):
        return f"device {node.device} requested by {node.op}"
    return None


def _kind(op: str) -> str:
    if _CALLS_PYTHON.match(op):
        return "Python callback"
    return "communication op" if _CALLS_RANKS.match(op) else "custom op"


def _nodes(graph: Any) -> Iterator[tuple[str, Any]]:
    for node in graph.node:
        yield "the main graph", node
    for function in graph.library.function:
        for node in function.node_def:
            yield f"function {function.signature.name!r}", node
