"""Exports models of graph-mode scripts (tensorflow.compat.v1): a Saver's checkpoint and a meta graph.

The meta graph is the base graph that a script wrote before it added training operations
(`<checkpoint>_basegraph.meta`), or else the checkpoint's own. It is pruned to the operations that the outputs need,
which removes all training operations.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.errors import ExportError
from keras_ddl.export import versions
from keras_ddl.export.graft import ExportResult
from keras_ddl.export.inference import replay
from keras_ddl.export.proof.scan import scan_proto
from keras_ddl.export.proof.validate import CleanProcess, validate_saved_model
from keras_ddl.export.sources import saved_variables
from keras_ddl.files import digests, durable

_WHAT = "An export"
_BASE = "_basegraph.meta"
# Operations that are not outputs of the model even if they have no consumers.
_NO_OUTPUTS = re.compile(
    r"^(NoOp|Const|Placeholder.*|(Resource)?Assign.*|ReadVariableOp|.*IsInitialized.*|IsVariableInitialized|Save.*|Restore.*"
    r"|.*HashTable.*|LookupTable.*|InitializeTable.*|.*Summary.*)$"
)
_ROWS = 2  # made-up rows on which the exported and the training graph are compared
_MOST = 12


def export_graph(
    checkpoint: str | Path,
    out_dir: str | Path,
    *,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    meta_graph: str | Path | None = None,
    version: int | str | None = None,
    keep: int | None = None,
) -> ExportResult:
    """Exports the checkpoint of a compat.v1 script to `out_dir/<version>/`, a SavedModel.

    Args:
        checkpoint: the path that a Saver returned, or its directory for the latest one.
        inputs, outputs: name in the signature -> tensor ("logits:0"). None: inputs are the placeholders that the
            outputs need; the output is the one operation without consumers.
        meta_graph: the graph to serve, as a .meta file or as the <name> of a `<name>_basegraph.meta` beside the
            checkpoint; None: the base graph, or else the checkpoint's own.
        version, keep: as in `export_saved_model`; 'step' is the number in the checkpoint's name.
    Raises: ExportError: no checkpoint or graph, unknown or ambiguous names, operations that no server runs, variables
        without weights, NaN weights; outputs differ. Nothing is published then.
    Cost: a session with the weights, and a clean process that loads them again.
    """
    prefix = _checkpoint(Path(checkpoint))
    step = re.search(r"-(\d+)$", prefix.name)
    final = versions.choose(Path(out_dir), version, int(step[1]) if step else None)
    file = _find_graph(prefix, None if meta_graph is None else str(meta_graph))
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(CleanProcess())  # loads TensorFlow in parallel
        meta = _read(file)
        nodes = {node.name: node for node in meta.graph_def.node}
        answers = _named(outputs, nodes, file) if outputs is not None else _only_output(nodes, file)
        servable = _prune(meta, list(answers.values()))
        kept = {node.name: node for node in servable.node}
        fed = _named(inputs, kept, file) if inputs is not None else _placeholders(kept)
        _scan(servable, file)
        stack.enter_context(bundle.translated(_WHAT, final, ExportError))
        staged = stack.enter_context(durable.staging_directory(final.parent))
        golden = staged / "golden.npz"
        _write(servable, meta, file, prefix, fed, answers, staged / "model", golden)
        answer = validate_saved_model(staged / "model", None, golden, process=process)
        same = "bit for bit" if answer["bitwise"] else f"to within {answer['largest']:.1e}"
        size = digests.size_of(staged / "model")
        final, removed = versions.publish(staged / "model", final, keep, automatic=version is None)
    return ExportResult(
        path=final,
        version=int(final.name),
        step=int(step[1]) if step else None,
        epoch=None,
        metrics={},
        bytes=size,
        seconds={"export": time.perf_counter() - begin},
        proof=f"answers {_ROWS} made-up rows in a clean process as the graph of {file.name} does, {same}",
        removed=removed,
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def _latest(directory: Path) -> Path | None:
    import tensorflow as tf

    prefix = tf.train.latest_checkpoint(str(directory))
    return None if prefix is None else Path(prefix)


def _checkpoint(path: Path) -> Path:
    prefix = _latest(path) if path.is_dir() else path
    if prefix is None or not prefix.with_name(prefix.name + ".index").exists():
        raise ExportError(
            f"A Saver's checkpoint must be the path that save() returned, or its directory. Received: {path}, without "
            "a checkpoint."
        )
    return prefix


def _find_graph(prefix: Path, wanted: str | None) -> Path:
    """Returns the file with the graph of a Saver's checkpoint.

    wanted: the name that the user gave, or None.
    Raises: ExportError: there is no such file, or several and no name was given.
    """
    stem = re.sub(r"-\d+$", "", prefix.name)
    own = [stem + _BASE, prefix.name + _BASE]
    base_graphs = sorted(file.name for file in prefix.parent.glob(f"*{_BASE}"))
    if wanted is not None:
        names = [f"{wanted}{_BASE}", f"{stem}_{wanted}{_BASE}", f"{wanted}.meta"]
        candidates = [Path(wanted), *(prefix.parent / name for name in names)]
    else:
        # Base graphs of other names rule out the training graph, but are ambiguous, so the user must choose.
        candidates = [prefix.with_name(name) for name in (own if base_graphs else [*own, f"{prefix.name}.meta"])]
    for file in candidates:
        if file.is_file():
            return file
    if base_graphs:
        names = [name.removesuffix(_BASE) for name in base_graphs]
        raise ExportError(
            f"An export needs exactly one graph. Received: {wanted or 'no name'}; beside {prefix} are "
            f"{', '.join(base_graphs)}. Choose with --meta-graph (meta_graph=), {' or '.join(names)}, or give a .meta "
            f"file."
        )
    if bundle.GRAPH in bundle.entries(str(prefix)):
        raise ExportError(
            f"A Saver's checkpoint must have a graph beside it. Received: {prefix}, of tf.train.Checkpoint, which "
            "stores only weights. Give the directory that holds the base graph of its model as CHECKPOINTS, and this "
            "checkpoint with --weights."
        )
    raise ExportError(
        f"A checkpoint must have a graph beside it. Received: none of {', '.join(file.name for file in candidates)} in "
        f"{prefix.parent}. Give the .meta file with --meta-graph."
    )


def _read(file: Path) -> Any:
    import tensorflow as tf
    from google.protobuf import text_format
    from google.protobuf.message import DecodeError

    data = file.read_bytes()
    try:
        return tf.compat.v1.MetaGraphDef.FromString(data)
    except DecodeError:
        pass
    try:
        return text_format.Parse(data.decode(), tf.compat.v1.MetaGraphDef())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ExportError(
            f"A meta graph must be a file that export_meta_graph wrote. Received: {file}: {error}."
        ) from error


# ---- names -----------------------------------------------------------------------------------------------------------


def _operation(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]


def _named(tensors: Mapping[str, str], nodes: Mapping[str, Any], file: Path) -> dict[str, str]:
    missing = sorted(each for each in tensors.values() if _operation(each) not in nodes)
    if missing:
        raise ExportError(
            f"Inputs and outputs must be tensors of the graph, and the outputs must depend on the inputs. Received: "
            f"{missing}, not in the pruned graph of {file}."
        )
    return {name: tensor if ":" in tensor else f"{tensor}:0" for name, tensor in tensors.items()}


def _only_output(nodes: Mapping[str, Any], file: Path) -> dict[str, str]:
    consumed = {_operation(name) for node in nodes.values() for name in node.input}
    savers = {name.rpartition("/")[0] + "/" for name, node in nodes.items() if node.op in ("SaveV2", "RestoreV2")}
    unconsumed = [
        name
        for name, node in nodes.items()
        if name not in consumed
        and node.op not in saved_variables.VARIABLES
        and not _NO_OUTPUTS.match(node.op)
        and not any(len(scope) > 1 and name.startswith(scope) for scope in savers)
    ]
    outputs = [name for name in unconsumed if not _is_loop_variable(nodes[name], nodes)] or unconsumed
    if len(outputs) != 1:
        raise ExportError(
            f"Without --outputs, a graph must have exactly one operation without consumers. Received: {file} with "
            f"{outputs[:_MOST] or 'none'}{' and more' if len(outputs) > _MOST else ''}. Name it: --outputs NAME=TENSOR."
        )
    return {_alias(outputs[0]): f"{outputs[0]}:0"}


def _is_loop_variable(node: Any, nodes: Mapping[str, Any]) -> bool:
    """Whether the node is the final value of a loop variable, which a loop returns even if it is unused."""
    if node.op == "Identity":
        return nodes[_operation(node.input[0])].op in ("While", "StatelessWhile")
    return node.op in ("Exit", "RefExit")


def _placeholders(nodes: Mapping[str, Any]) -> dict[str, str]:
    return {_alias(name): f"{name}:0" for name, node in nodes.items() if node.op == "Placeholder"}


def _alias(operation: str) -> str:
    return operation.replace("/", "_")


# ---- the graph -------------------------------------------------------------------------------------------------------


def _prune(meta: Any, outputs: Sequence[str]) -> Any:
    """Returns the GraphDef that the outputs need, with the initializers of its tables and without devices."""
    import tensorflow as tf

    goals = [_operation(tensor) for tensor in outputs]
    servable = tf.compat.v1.graph_util.extract_sub_graph(meta.graph_def, goals)
    nodes = {node.name: node for node in meta.graph_def.node}
    kept = {node.name for node in servable.node}
    fill = [
        name
        for name in meta.collection_def["table_initializer"].node_list.value
        if name in nodes and {_operation(each) for each in nodes[name].input} & kept
    ]
    if fill:
        servable = tf.compat.v1.graph_util.extract_sub_graph(meta.graph_def, [*goals, *fill])
    for node in servable.node:
        node.device = ""
    return servable


def _scan(servable: Any, file: Path) -> None:
    """Scans the graph before it is imported, because importing an unknown operation fails with an obscure message."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    saved.meta_graphs.add().graph_def.CopyFrom(servable)
    scan_proto(saved).raise_for_problems(str(file))


def _write(
    servable: Any,
    meta: Any,
    file: Path,
    prefix: Path,
    fed: dict[str, str],
    answers: dict[str, str],
    into: Path,
    golden: Path,
) -> None:
    """Writes the SavedModel, and to `golden` made-up rows with the graph's outputs in this session."""
    import numpy as np
    import tensorflow as tf

    v1 = tf.compat.v1
    places = saved_variables.places(meta, servable, prefix)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(servable, name="")
        saver = saved_variables.saver_of(graph, places)
        tables = [name for name in meta.collection_def["table_initializer"].node_list.value if _has(graph, name)]
        fill = tf.group(*(graph.get_operation_by_name(name) for name in tables))
        assets = [name for name in meta.collection_def["asset_filepaths"].node_list.value if _has(graph, name)]
        _refuse_missing_files(graph, assets, file)
        feeds, fetches = ({name: graph.get_tensor_by_name(t) for name, t in each.items()} for each in (fed, answers))
        with v1.Session(config=v1.ConfigProto(device_count={"GPU": 0})) as session:
            saved_variables.restore(session, saver, places, prefix)
            session.run(fill)
            rows = {name: _made_up(tensor) for name, tensor in feeds.items()}
            outputs = session.run(fetches, {feeds[name]: value for name, value in rows.items()})
            arrays: dict[str, Any] = {replay.ROWS + name: replay.storable(value) for name, value in rows.items()}
            arrays |= {replay.ANSWERS + name: replay.storable(value) for name, value in outputs.items()}
            arrays[replay.THREADS] = replay.kernel_threads()
            np.savez(golden, **arrays)
            builder = v1.saved_model.builder.SavedModelBuilder(str(into))
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.SERVING],
                {"serving_default": v1.saved_model.signature_def_utils.predict_signature_def(feeds, fetches)},
                assets_collection=[graph.get_tensor_by_name(name) for name in assets],
                main_op=fill,
                strip_default_attrs=True,
                saver=saver,
            )
            builder.save()


def _refuse_missing_files(graph: Any, assets: Sequence[str], file: Path) -> None:
    import tensorflow as tf

    read = [
        str(tf.make_ndarray(graph.get_tensor_by_name(name).op.get_attr("value")).item().decode()) for name in assets
    ]
    missing = [each for each in read if not tf.io.gfile.exists(each)]
    if missing:
        raise ExportError(
            f"Files that a graph's tables read are copied into the SavedModel. Received: {file}, which reads "
            f"{missing}, missing in {Path.cwd()}. Export where the script ran, or write the graph with absolute names."
        )


def _has(graph: Any, name: str) -> bool:
    try:
        graph.as_graph_element(_operation(name))
    except KeyError:
        return False
    return True


def _made_up(tensor: Any) -> Any:
    import numpy as np

    shape = [
        _ROWS if size is None else size for size in (tensor.shape.as_list() if tensor.shape.rank is not None else [])
    ]
    if tensor.dtype.is_floating:
        return np.random.default_rng(0).normal(size=shape).astype(tensor.dtype.as_numpy_dtype)
    return (
        np.full(shape, b"", object) if tensor.dtype.name == "string" else np.zeros(shape, tensor.dtype.as_numpy_dtype)
    )
