"""The signatures of a servable graph: `serving_default`, and `classify` and `regress` over serialized tf.Example.

TensorFlow Serving calls Classify and Regress with a vector of tf.Example records. Classify answers `classes` (string)
and `scores` (float32), both [batch, n]; Regress answers `outputs` (float32) [batch].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_ddl.errors import ExportError
from keras_ddl.export.proof.replay import rows_of, source
from keras_ddl.export.signatures import composites
from keras_ddl.export.signatures.declarations import Declared, check
from keras_ddl.export.signatures.functions import Function, plain
from keras_ddl.export.signatures.saved_graph import DEFAULT
from keras_ddl.export.tracing.layer_outputs import place_of, recorded

if TYPE_CHECKING:
    from keras_ddl.export.tracing.inputs import Inputs

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
    """A model, traced.

    Attributes:
        functions: signature -> concrete function; of `serving_default`, the one that all signatures by names share: it
            answers the outputs and what layers were asked for.
        outputs: of these answers, the model's own.
        layers: layer -> [place in that function, dtype, shape].
        live: the plain function behind all of that.
        own: the inputs of those signatures that have their own.
    """

    functions: dict[str, Any]
    outputs: list[str]
    layers: dict[str, list[Any]]
    live: Callable[..., dict[str, Any]]
    own: dict[str, Inputs]

    def answer(self, **tensors: Any) -> dict[str, Any]:
        """Returns what the traced functions answer, in the names of `live`."""
        answers = dict(self.functions[DEFAULT](**self.of(DEFAULT, tensors)))
        for name, function in self.functions.items():
            if name not in (DEFAULT, *METHODS):
                answered = function(**self.of(name, tensors))
                answers |= {source(name, each): tensor for each, tensor in answered.items()}
        return answers

    def of(self, signature: str, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those rows that a signature takes."""
        return rows_of(signature, rows, {name: each.specs for name, each in self.own.items()})


def trace(
    model: Any,
    inputs: Inputs,
    classify: Classify | None,
    regress: Regress | None,
    float32_outputs: bool,
    declared: Declared,
) -> Trace:
    """Traces the model and the signatures that need a function of their own.

    No retracing and no autograph, as in Keras's own call path. Raises: ExportError: what is declared is not there.
    """
    import tensorflow as tf

    seen: dict[str, Any] = {}
    asked = {each for outputs in declared.sources.values() for each in outputs.values()}

    def call(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        with recorded(model) as layers:
            outputs = _named_outputs(model, model(inputs.pack(tensors), training=False))
        return _servable(outputs, float32_outputs), layers

    def asked_of(answers: dict[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
        return answers | _servable({name: layers[name] for name in asked - set(answers)}, float32_outputs)

    def serve(**tensors: Any) -> dict[str, Any]:
        answers, layers = call(tensors)
        check(declared, answers, layers)
        seen.update(outputs=list(answers), layers=layers)
        return asked_of(answers, layers)

    whole = tf.function(serve, autograph=False).get_concrete_function(**inputs.specs)
    own, layers = seen["outputs"], seen["layers"]
    places = {name: [place_of(tensor, whole.graph), *describe(tensor)] for name, tensor in layers.items()}
    traced = {DEFAULT: whole}
    if classify is not None:
        chosen = _choose(own, classify.scores, "Classify")
        traced["classify"] = _over_examples(inputs, classify.features, _classifier(whole, chosen, classify.labels))
    if regress is not None:
        chosen = _choose(own, regress.output, "Regress")
        traced["regress"] = _over_examples(
            inputs,
            regress.features,
            lambda tensors: {"outputs": tf.reshape(tf.cast(whole(**tensors)[chosen], tf.float32), [-1])},
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
            whose = "its sample's inputs by name" if name in own_inputs else "the model's inputs"
            raise ExportError(
                f"A signature's function is called with {whose}, and must return tensors. Received: that of "
                f"{name!r} failed with {type(error).__name__}: {error}."
            ) from error

    def live(**tensors: Any) -> dict[str, Any]:
        answers = asked_of(*call(found.of(DEFAULT, tensors)))
        for name, function in functions.items():
            answered = function(**found.of(name, tensors))
            answers |= {source(name, each): tensor for each, tensor in answered.items()}
        return answers

    inside = {name: each for name, each in places.items() if each[0] is not None}
    found = Trace(traced, own, inside, live, own_inputs)
    return found


def _answering(function: Any, inputs: Inputs, float32: bool) -> Callable[..., dict[str, Any]]:
    """A signature's function as one of tensors by name, and answers by name."""
    import keras

    run = plain(function, inputs)
    layer = function.call if isinstance(function, Function) else function
    layer = layer if isinstance(layer, keras.layers.Layer) else None
    return lambda **tensors: _servable(_named_outputs(layer, run(**tensors)), float32)


def _classifier(whole: Callable[..., Any], chosen: str, labels: Sequence[str] | None) -> Callable[..., Any]:
    import tensorflow as tf

    def run(tensors: Mapping[str, Any]) -> dict[str, Any]:
        scores = tf.cast(whole(**tensors)[chosen], tf.float32)
        if scores.shape.rank != 2 or (labels is not None and scores.shape[1] not in (None, len(labels))):
            raise ExportError(
                f"Classify needs scores of shape [batch, {len(labels) if labels is not None else 'n'}]. Received: "
                f"output {chosen!r} of shape {scores.shape}. Choose another output, or as many labels as classes."
            )
        answer = {"scores": scores}
        if labels is not None:
            answer["classes"] = tf.tile(tf.constant([list(labels)], tf.string), [tf.shape(scores)[0], 1])
        return answer

    return run


def _over_examples(inputs: Inputs, features: Mapping[str, Any] | None, run: Callable[..., Any]) -> Any:
    import tensorflow as tf

    leaves = inputs.leaves
    parsed_as = dict(features) if features is not None else {n: _feature(n, s) for n, s in leaves.items()}
    if set(parsed_as) != set(leaves):
        raise ExportError(
            f"features maps every input to a tf.io feature. Received: {sorted(parsed_as)}; the inputs are "
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

    # The server looks the argument up as `inputs`.
    return tf.function(lambda inputs: serve_examples(inputs), autograph=False).get_concrete_function(
        inputs=tf.TensorSpec([None], tf.string, name="inputs")
    )


def _feature(name: str, spec: Any) -> Any:
    import tensorflow as tf

    shape = spec.shape.as_list()[1:]
    if None in shape or not isinstance(spec, tf.TensorSpec):
        raise ExportError(
            f"A tf.Example feature has a fixed shape. Received: input {name!r} of shape {spec.shape}. "
            f"Give features={{{name!r}: tf.io...}} to Classify or Regress."
        )
    if spec.dtype.name == "string":
        return tf.io.FixedLenFeature(shape, tf.string)
    return tf.io.FixedLenFeature(shape, tf.float32 if spec.dtype.is_floating else tf.int64)


def _as_composite(name: str, parsed: Any, spec: Any) -> Any:
    import tensorflow as tf

    sparse = isinstance(spec, tf.SparseTensorSpec)
    if isinstance(parsed, tf.SparseTensor) and sparse:
        # What VarLenFeature has parsed is as wide as the widest example.
        sizes = zip(spec.shape.as_list(), tf.unstack(parsed.dense_shape, spec.shape.rank))
        shape = tf.stack([found if size is None else tf.constant(size, tf.int64) for size, found in sizes])
        return tf.cast(tf.SparseTensor(parsed.indices, parsed.values, shape), spec.dtype)
    if isinstance(parsed, tf.RaggedTensor) and not sparse:
        return tf.cast(parsed, spec.dtype)
    raise ExportError(
        f"features gives a sparse input a feature that is parsed as sparse (VarLenFeature, SparseFeature), and a "
        f"ragged one a RaggedFeature. Received: input {name!r}, {spec}, with a {type(parsed).__name__}."
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
        raise ExportError(f"{who} takes one of the model's outputs, {sorted(outputs)}. Received: {name!r}.")
    return name


def _named_outputs(model: Any, outputs: Any) -> dict[str, Any]:
    """A dict's own keys; else the names that the output layers were given; else output_0, output_1, ..."""
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
    """Whether Keras chose the name (class and a number that depends on what the process made before)."""
    kind = type(model.get_layer(layer_name)).__name__.replace("_", "").lower()
    return re.sub(r"_\d+$", "", layer_name).replace("_", "") == kind


def _servable(outputs: Mapping[str, Any], float32: bool) -> dict[str, Any]:
    """What a signature answers: dense tensors; of sparse and ragged ones the components (composites.py)."""
    import tensorflow as tf

    found: dict[str, Any] = {}
    for name, tensor in outputs.items():
        if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
            parts = composites.components(name, tensor)
        else:
            parts = {name: tf.convert_to_tensor(tensor)}
        for part, each in parts.items():
            if part in found:
                raise ExportError(f"The outputs of a signature must have different names. Received: {part!r} twice.")
            half = each.dtype in (tf.float16, tf.bfloat16)
            found[part] = tf.cast(each, tf.float32) if float32 and half else tf.identity(each)
    return found


def describe(tensor: Any) -> list[Any]:
    """Returns [dtype, shape]."""
    return [tensor.dtype.name, tensor.shape.as_list() if tensor.shape.rank is not None else None]
