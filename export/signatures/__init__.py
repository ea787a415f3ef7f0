"""The signatures of a servable graph: `serving_default`, and `classify` and `regress` over serialized tf.Example.

TensorFlow Serving calls Classify and Regress with a vector of tf.Example records. Classify answers `classes` (string)
and `scores` (float32), both [batch, n]; Regress answers `outputs` (float32) [batch].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.inference import composites
from keras_ddl.export.inference.inputs import Inputs
from keras_ddl.export.inference.replay import DEFAULT, rows_of, source
from keras_ddl.export.signatures.declarations import Declared, check
from keras_ddl.export.signatures.functions import Function, plain
from keras_ddl.export.signatures.layer_outputs import place_of, recorded

METHODS = {"classify": "tensorflow/serving/classify", "regress": "tensorflow/serving/regress"}


@dataclass(frozen=True)
class Classify:
    """Adds the signature `classify`.

    Args:
        scores: name of the output [batch, n] that holds the scores; may be left out if there is one output.
        labels: the n class names, served as `classes`.
        features: input name -> tf.io feature; by default FixedLenFeature of each input's shape, under its name.
    """

    scores: str | None = None
    labels: Sequence[str] | None = None
    features: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Regress:
    """Adds the signature `regress`: `output` names the output [batch] or [batch, 1]; `features` as in `Classify`."""

    output: str | None = None
    features: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Trace:
    """The concrete functions of a traced model.

    Attributes:
        functions: signature -> concrete function. All signatures that name outputs share the function of
            `serving_default`, which returns the model's outputs and the layers that signatures name.
        outputs: names of the model's own outputs.
        layers: layer -> [place in the shared function, dtype, shape].
        live: the Python function that computes the same without a graph.
        own: signature -> its inputs, for signatures that do not take the model's.
    """

    functions: dict[str, Any]
    outputs: list[str]
    layers: dict[str, list[Any]]
    live: Callable[..., dict[str, Any]]
    own: dict[str, Inputs]

    def answer(self, **tensors: Any) -> dict[str, Any]:
        """Returns the outputs of all traced functions, with the names that `live` gives them."""
        answers = dict(self.functions[DEFAULT](**self.of(DEFAULT, tensors)))
        for name, function in self.functions.items():
            if name not in (DEFAULT, *METHODS):
                outputs = function(**self.of(name, tensors))
                answers |= {source(name, output): tensor for output, tensor in outputs.items()}
        return answers

    def of(self, signature: str, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those `rows` that a signature takes."""
        return rows_of(signature, rows, {name: inputs.specs for name, inputs in self.own.items()})


def trace(
    model: Any,
    inputs: Inputs,
    classify: Classify | None,
    regress: Regress | None,
    float32_outputs: bool,
    declared: Declared,
) -> Trace:
    """Traces the model, and the signatures that need their own function.

    Does not retrace and does not use autograph, like Keras's own call path. Raises: ExportError: a signature names an
    unknown output, or its function fails.
    """
    import tensorflow as tf

    seen: dict[str, Any] = {}
    named = {source for outputs in declared.sources.values() for source in outputs.values()}

    def call(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        with recorded(model) as layers:
            outputs = _named_outputs(model, model(inputs.pack(tensors), training=False))
        return _servable(outputs, float32_outputs), layers

    def with_layers(answers: dict[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
        return answers | _servable({name: layers[name] for name in named - set(answers)}, float32_outputs)

    def serve(**tensors: Any) -> dict[str, Any]:
        answers, layers = call(tensors)
        check(declared, answers, layers)
        seen.update(outputs=list(answers), layers=layers)
        return with_layers(answers, layers)

    shared = tf.function(serve, autograph=False).get_concrete_function(**inputs.specs)
    own, layers = seen["outputs"], seen["layers"]
    places = {name: [place_of(tensor, shared.graph), *describe(tensor)] for name, tensor in layers.items()}
    traced = {DEFAULT: shared}
    if classify is not None:
        output = _choose(own, classify.scores, "Classify")
        traced["classify"] = _over_examples(inputs, classify.features, _classifier(shared, output, classify.labels))
    if regress is not None:
        output = _choose(own, regress.output, "Regress")
        traced["regress"] = _over_examples(
            inputs,
            regress.features,
            lambda tensors: {"outputs": tf.reshape(tf.cast(shared(**tensors)[output], tf.float32), [-1])},
        )
    own_inputs = {name: each.inputs() for name, each in declared.functions.items() if isinstance(each, Function)}
    functions = {
        name: _answering(each, own_inputs.get(name, inputs), float32_outputs)
        for name, each in declared.functions.items()
    }
    for name, function in functions.items():
        taken = own_inputs.get(name, inputs)
        try:
            traced[name] = tf.function(function, autograph=False).get_concrete_function(**taken.specs)
        except Exception as error:
            arguments = "its sample's inputs by name" if name in own_inputs else "the model's inputs"
            raise ExportError(
                f"A signature's function is called with {arguments}, and must return tensors. Received: the "
                f"function of {name!r} failed with {type(error).__name__}: {error}."
            ) from error

    def live(**tensors: Any) -> dict[str, Any]:
        answers = with_layers(*call(result.of(DEFAULT, tensors)))
        for name, function in functions.items():
            outputs = function(**result.of(name, tensors))
            answers |= {source(name, output): tensor for output, tensor in outputs.items()}
        return answers

    inside = {name: described for name, described in places.items() if described[0] is not None}
    result = Trace(traced, own, inside, live, own_inputs)
    return result


def _answering(function: Any, inputs: Inputs, float32: bool) -> Callable[..., dict[str, Any]]:
    """Wraps a signature's function: it takes tensors by name and returns tensors by name."""
    import keras

    run = plain(function, inputs)
    layer = function.call if isinstance(function, Function) else function
    layer = layer if isinstance(layer, keras.layers.Layer) else None
    return lambda **tensors: _servable(_named_outputs(layer, run(**tensors)), float32)


def _classifier(function: Callable[..., Any], output: str, labels: Sequence[str] | None) -> Callable[..., Any]:
    import tensorflow as tf

    def run(tensors: Mapping[str, Any]) -> dict[str, Any]:
        scores = tf.cast(function(**tensors)[output], tf.float32)
        if scores.shape.rank != 2 or (labels is not None and scores.shape[1] not in (None, len(labels))):
            raise ExportError(
                f"Classify needs scores of shape [batch, {len(labels) if labels is not None else 'n'}]. Received: "
                f"output {output!r} of shape {scores.shape}. Choose another output, or as many labels as classes."
            )
        answer = {"scores": scores}
        if labels is not None:
            answer["classes"] = tf.tile(tf.constant([list(labels)], tf.string), [tf.shape(scores)[0], 1])
        return answer

    return run


def _over_examples(inputs: Inputs, features: Mapping[str, Any] | None, run: Callable[..., Any]) -> Any:
    """Traces a function of serialized tf.Examples, which parses them to the inputs of `run`."""
    import tensorflow as tf

    leaves = inputs.leaves
    parsed_as = dict(features) if features is not None else {n: _feature(n, s) for n, s in leaves.items()}
    if set(parsed_as) != set(leaves):
        raise ExportError(
            f"features must map every input to a tf.io feature. Received: {sorted(parsed_as)}; the inputs are "
            f"{sorted(leaves)}."
        )

    def serve_examples(inputs_: Any) -> dict[str, Any]:
        parsed = tf.io.parse_example(inputs_, parsed_as)
        tensors: dict[str, Any] = {}
        for name, spec in leaves.items():
            if name in inputs.composites:
                tensors |= composites.components(name, _as_composite(name, parsed[name], spec))
            else:
                tensors[name] = _cast(parsed[name], spec.dtype)
        return run(tensors)

    # TensorFlow Serving requires the argument name `inputs`.
    return tf.function(lambda inputs: serve_examples(inputs), autograph=False).get_concrete_function(
        inputs=tf.TensorSpec([None], tf.string, name="inputs")
    )


def _feature(name: str, spec: Any) -> Any:
    import tensorflow as tf

    shape = spec.shape.as_list()[1:]
    if None in shape or not isinstance(spec, tf.TensorSpec):
        raise ExportError(
            f"A tf.Example feature must have a fixed shape. Received: input {name!r} of shape {spec.shape}. "
            f"Give features={{{name!r}: tf.io...}} to Classify or Regress."
        )
    if spec.dtype.name == "string":
        return tf.io.FixedLenFeature(shape, tf.string)
    return tf.io.FixedLenFeature(shape, tf.float32 if spec.dtype.is_floating else tf.int64)


def _as_composite(name: str, parsed: Any, spec: Any) -> Any:
    import tensorflow as tf

    sparse = isinstance(spec, tf.SparseTensorSpec)
    if isinstance(parsed, tf.SparseTensor) and sparse:
        # A parsed VarLenFeature is as wide as the widest example.
        sizes = zip(spec.shape.as_list(), tf.unstack(parsed.dense_shape, spec.shape.rank))
        shape = tf.stack([actual if size is None else tf.constant(size, tf.int64) for size, actual in sizes])
        return tf.cast(tf.SparseTensor(parsed.indices, parsed.values, shape), spec.dtype)
    if isinstance(parsed, tf.RaggedTensor) and not sparse:
        return tf.cast(parsed, spec.dtype)
    raise ExportError(
        f"features must have a VarLenFeature or SparseFeature for a sparse input, and a RaggedFeature for a ragged "
        f"one. Received: input {name!r}, {spec}, with a {type(parsed).__name__}."
    )


def _cast(tensor: Any, dtype: Any) -> Any:
    import tensorflow as tf

    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _choose(outputs: Sequence[str], name: str | None, who: str) -> str:
    if name is None and len(outputs) == 1:
        return next(iter(outputs))
    if name is None or name not in outputs:
        raise ExportError(f"{who} must name one of the model's outputs, {sorted(outputs)}. Received: {name!r}.")
    return name


def _named_outputs(model: Any, outputs: Any) -> dict[str, Any]:
    """Names outputs by the keys of a dict, else by names of output layers that a user chose, else output_0, ..."""
    import keras
    from keras import tree

    pairs = [(path, leaf) for path, leaf in tree.flatten_with_path(outputs) if leaf is not None]
    if all(path and all(isinstance(part, str) for part in path) for path, _ in pairs):
        return {"_".join(path): leaf for path, leaf in pairs}
    names = list(getattr(model, "output_names", None) or [])
    if isinstance(model, keras.Sequential):
        names = [model.layers[-1].name]
    if len(names) != len(pairs) or len(set(names)) != len(names):
        names = [""] * len(pairs)
    chosen = [f"output_{i}" if not name or _is_automatic(model, name) else name for i, name in enumerate(names)]
    return {name: leaf for name, (_, leaf) in zip(chosen, pairs)}


def _is_automatic(model: Any, layer_name: str) -> bool:
    """Whether Keras chose the name: class and number, which depends on the layers that the process created before."""
    kind = type(model.get_layer(layer_name)).__name__.replace("_", "").lower()
    return re.sub(r"_\d+$", "", layer_name).replace("_", "") == kind


def _servable(outputs: Mapping[str, Any], float32: bool) -> dict[str, Any]:
    """Converts outputs to dense tensors, which a signature can return; composites.py splits sparse and ragged ones."""
    import tensorflow as tf

    servable: dict[str, Any] = {}
    for name, tensor in outputs.items():
        if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
            parts = composites.components(name, tensor)
        else:
            parts = {name: tf.convert_to_tensor(tensor)}
        for part, each in parts.items():
            if part in servable:
                raise ExportError(f"The outputs of a signature must have different names. Received: {part!r} twice.")
            half = each.dtype in (tf.float16, tf.bfloat16)
            servable[part] = tf.cast(each, tf.float32) if float32 and half else tf.identity(each)
    return servable


def describe(tensor: Any) -> list[Any]:
    """Returns [dtype, shape]."""
    return [tensor.dtype.name, tensor.shape.as_list() if tensor.shape.rank is not None else None]
