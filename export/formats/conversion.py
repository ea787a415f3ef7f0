"""A program that converts a SavedModel to another format, or runs the converted model, one task per process.

A converter imports many modules and changes global state. The converted model runs without TensorFlow, as on its target
devices. The program reads one JSON request from stdin and writes one line of JSON to stdout.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK = "keras_ddl-conversion:"  # converters may also print to stdout
_BLOCKED = ("keras", "tf_keras", "keras_ddl")  # no model's code is needed
_HERE = Path(__file__)
_MESSAGES = 3  # shown per failure


def _load_replay() -> Any:
    """Loads replay.py by its path, because keras_ddl is blocked here and its folders could hide other modules."""
    spec = importlib.util.spec_from_file_location("replay", _HERE.parents[1] / "inference" / "replay.py")
    assert spec is not None and spec.loader is not None  # always set for a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class UnsupportedError(Exception):
    """The format lacks some of the graph's operations: `nodes` are pairs of operation and node name."""

    def __init__(self, nodes: list[tuple[str, str]], message: str = "") -> None:
        super().__init__(message)
        self.nodes = list(dict.fromkeys(nodes))


def run_reference(path: str, sample: str, golden: str, tolerance: float) -> dict[str, Any]:
    """Runs the SavedModel on the rows in `sample`, and writes rows and outputs to the file `golden`.

    Returns: half (whether it computes in 16 bits), random (outputs that differ from call to call).
    """
    import numpy as np
    import tensorflow as tf

    served = tf.saved_model.load(path)
    function = served.signatures["serving_default"]
    rows, specs = replay.load_rows(sample), function.structured_input_signature[1]
    replay.refuse_other_names(rows, specs)
    feed = {name: tf.cast(tf.constant(row), specs[name].dtype) for name, row in rows.items()}
    first, again = (
        {name: replay.storable(tensor.numpy()) for name, tensor in function(**feed).items()} for _ in range(2)
    )
    random = [name for name in first if replay.compare({name: first[name]}, {name: again[name]}, tolerance)["problems"]]
    np.savez(
        golden,
        **{replay.ROWS + name: replay.storable(row) for name, row in rows.items()},
        **{replay.ANSWERS + name: answer for name, answer in first.items()},
    )
    halves = (tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum)
    graphs = [graph.graph_def for graph in _read(path).meta_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for graph in graphs for function in graph.library.function for node in function.node_def]
    half = any(attribute.type in halves for node in nodes for attribute in node.attr.values())
    return {"half": half, "random": random}


def _read(path: str) -> Any:
    from tensorflow.core.protobuf import saved_model_pb2

    return saved_model_pb2.SavedModel.FromString((Path(path) / "saved_model.pb").read_bytes())


# ---- ONNX ------------------------------------------------------------------------------------------------------------


def to_onnx(path: str, into: str, opset: int | None, quantize: None) -> dict[str, Any]:
    """Converts with tf2onnx. Returns: opset, versions (of packages), warnings."""
    import onnx
    import tensorflow as tf
    from tf2onnx import optimizer, tf_loader, tfonnx

    state = _RemovedState()
    logging.getLogger("tf2onnx.tf_loader").addHandler(state)
    _register_erfc()
    saved = _read(path)
    if saved.meta_graphs[0].HasField("object_graph_def"):
        graph, inputs, outputs, tables, names = tf_loader.from_saved_model(
            path,
            None,
            None,
            tag="serve",
            signatures=["serving_default"],
            return_initialized_tables=True,
            return_tensors_to_rename=True,
        )
    else:
        graph, inputs, outputs, names = _frozen(path)
        tables = None
    with tf.Graph().as_default() as imported:
        tf.import_graph_def(graph, name="")
        converted = tfonnx.process_tf_graph(
            imported,
            opset=opset,
            input_names=inputs,
            output_names=outputs,
            tensors_to_rename=names,
            initialized_tables=tables,
        )
        model = optimizer.optimize_graph(converted).make_model("serving_default")
    # tf2onnx only logs unknown operations and leaves them in a model that nothing loads.
    sets = {each.domain: each.version for each in model.opset_import}
    foreign = [
        (node.op_type, node.name)
        for node in _onnx_nodes(model.graph)
        if node.domain not in sets or not onnx.defs.has(node.op_type, sets[node.domain], node.domain)
    ]
    if foreign:
        raise UnsupportedError(foreign)
    Path(into).write_bytes(model.SerializeToString())
    return {"opset": sets[""], "versions": _versions("tf2onnx", "onnx", "tensorflow"), "warnings": state.warnings}


def _frozen(path: str) -> tuple[Any, list[str], list[str], dict[str, str]]:
    """Freezes the variables of a graph-mode SavedModel, which tf2onnx would leave in.

    Returns: the graph, the names of its inputs and of its outputs, and tensor -> name in the signature.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        signature = v1.saved_model.load(session, ["serve"], path).signature_def["serving_default"]
        inputs = {info.name: name for name, info in signature.inputs.items()}
        outputs = {info.name: name for name, info in signature.outputs.items()}
        goals = [tensor.partition(":")[0] for tensor in outputs]
        # The conversion reads values through operations of these names, which pruning to the outputs may have removed.
        for variable in [each for each in graph.get_operations() if each.type == "VarHandleOp"]:
            name = f"{variable.name}/Read/ReadVariableOp"
            if name not in {each.name for each in graph.get_operations()}:
                dtype = variable.get_attr("dtype")
                tf.raw_ops.ReadVariableOp(resource=variable.outputs[0], dtype=dtype, name=name)
        frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), goals)
    return frozen, list(inputs), list(outputs), inputs | outputs


class _RemovedState(logging.Handler):
    """Collects tf2onnx's messages about state that it removes because ONNX has no variables."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Removed "):
            self.warnings.append(f"ONNX keeps no state between calls: {message.removeprefix('Removed ')} is left out")


def _register_erfc() -> None:
    """Registers Erfc, which every exact GELU contains and tf2onnx 1.17 lacks, as 1 - Erf (ONNX opset 9)."""
    import numpy as np
    from tf2onnx import utils
    from tf2onnx.handler import tf_op

    @tf_op("Erfc")
    class Erfc:
        @classmethod
        def version_9(cls, ctx: Any, node: Any, **_: Any) -> None:
            dtype = utils.map_onnx_to_numpy_type(ctx.get_dtype(node.output[0]))
            one = ctx.make_const(utils.make_name("one"), np.ones([], dtype))
            node.type = "Erf"
            ctx.insert_new_node_on_output("Sub", node.output[0], inputs=[one.output[0], node.output[0]])


def _onnx_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _onnx_nodes(inner)


def run_onnx(file: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Runs ONNX Runtime. Returns: answers, inputs, outputs (name -> [dtype, shape]), versions."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    kinds = {"float": "float32", "double": "float64"}

    def described(tensors: list[Any]) -> dict[str, Any]:
        kind = {each.name: each.type.removeprefix("tensor(").removesuffix(")") for each in tensors}
        shapes = {each.name: [size if isinstance(size, int) else None for size in each.shape] for each in tensors}
        return {name: [kinds.get(kind[name], kind[name]), shapes[name]] for name in kind}

    inputs, outputs = described(session.get_inputs()), described(session.get_outputs())
    feed = {
        name: np.vectorize(bytes.decode, otypes=[object])(replay.texts(rows[name]))
        if dtype == "string"
        else rows[name].astype(dtype)
        for name, (dtype, _) in inputs.items()
    }
    answers = dict(zip(outputs, session.run(list(outputs), feed)))
    return {"answers": answers, "inputs": inputs, "outputs": outputs, "versions": _versions("onnxruntime")}


# ---- TensorFlow Lite -------------------------------------------------------------------------------------------------


def to_tflite(path: str, into: str, opset: None, quantize: str | None) -> dict[str, Any]:
    """Converts with TensorFlow's converter. Returns: versions (of packages), warnings."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(path, signature_keys=["serving_default"])
    if quantize is not None:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    try:
        model = converter.convert()
    except Exception as error:  # its type is private
        # Each line concerns one node: loc(...fused["Op:", "node@function"]...): error: what is wrong.
        sentences = re.findall(r"^.*error: .*$", str(error), re.MULTILINE)
        places = [re.search(r'fused\["(\w+):", "([^"@]*)', each) for each in sentences]
        if not any(places):
            raise
        message = next((re.sub(r"^.*error: (loc\(.*?\)+: )?", "", each) for each in sentences), "")
        raise UnsupportedError([(place[1], place[2]) for place in places if place], message[:300]) from error
    Path(into).write_bytes(model)
    return {"versions": _versions("tensorflow"), "warnings": []}


def run_tflite(file: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Runs LiteRT's interpreter. Returns: answers, inputs, outputs (name -> [dtype, shape]), versions."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(model_path=file).get_signature_runner("serving_default")

    def described(tensors: dict[str, Any]) -> dict[str, Any]:
        kinds = {name: np.dtype(each["dtype"]) for name, each in tensors.items()}
        shapes = {
            name: [None if size < 0 else int(size) for size in each.get("shape_signature", each["shape"])]
            for name, each in tensors.items()
        }
        return {name: ["string" if kinds[name].kind in "OSU" else kinds[name].name, shapes[name]] for name in kinds}

    inputs, outputs = described(runner.get_input_details()), described(runner.get_output_details())
    feed = {
        name: rows[name].astype(object) if dtype == "string" else rows[name].astype(dtype)
        for name, (dtype, _) in inputs.items()
    }
    versions = _versions("ai-edge-litert")
    return {"answers": runner(**feed), "inputs": inputs, "outputs": outputs, "versions": versions}


# ---- the program -----------------------------------------------------------------------------------------------------


def convert(kind: str, path: str, into: str, sample: str, golden: str, tolerance: float, **how: Any) -> dict[str, Any]:
    """Runs the SavedModel as the reference, and converts it. `how`: opset, quantize."""
    reference = run_reference(path, sample, golden, tolerance)
    converter: dict[str, Callable[..., dict[str, Any]]] = {"onnx": to_onnx, "tflite": to_tflite}
    return {**reference, **converter[kind](path, into, **how)}


def run(kind: str, file: str, golden: str, into: str) -> dict[str, Any]:
    """Runs the converted model on the rows in `golden`, and writes its outputs to the file `into`."""
    import numpy as np

    result = {"onnx": run_onnx, "tflite": run_tflite}[kind](file, replay.load_rows(golden, replay.ROWS))
    outputs = {name: np.asarray(output) for name, output in result.pop("answers").items()}
    replay.save(into, {name: replay.storable(output) for name, output in outputs.items()})
    return result


def _versions(*packages: str) -> dict[str, str]:
    """Returns package -> version. TensorFlow's is read from the module, because several packages install it."""
    module = sys.modules.get("tensorflow")
    return {
        name: module.__version__ if name == "tensorflow" and module else importlib.metadata.version(name)
        for name in packages
    }


def main() -> None:
    """Runs the task that the request on stdin names, with the request's other fields as arguments."""
    for name in _BLOCKED:
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    request = json.loads(sys.stdin.readline())
    task = request.pop("task")
    tasks: dict[str, Callable[..., dict[str, Any]]] = {"convert": convert, "run": run}
    if task == "run":
        sys.modules["tensorflow"] = None  # type: ignore[assignment]
    try:
        answer = tasks[task](**request)
    except UnsupportedError as error:
        answer = {"unsupported": error.nodes, "failed": str(error)}
    except Exception as error:  # a failure of the converter or the runtime is the result
        lines = [line for line in str(error).splitlines() if line.strip()]
        answer = {"failed": f"{type(error).__name__}: {' '.join(lines[:_MESSAGES])}"}
    print(MARK + json.dumps(answer), flush=True)


replay = _load_replay()

if __name__ == "__main__":
    main()
