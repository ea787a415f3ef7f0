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
from keras_ddl.export.inputs import Inputs

DEFAULT = "serving_default"
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


def trace(
    model: Any, inputs: Inputs, classify: Classify | None, regress: Regress | None, float32_outputs: bool
) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """Returns (signature name -> concrete function, the plain function behind `serving_default`).

    No retracing and no autograph, as in Keras's own call path.
    """
    import tensorflow as tf

    def serve(**tensors: Any) -> dict[str, Any]:
        outputs = _named_outputs(model, model(inputs.pack(tensors), training=False))
        return {name: _servable(name, tensor, float32_outputs) for name, tensor in outputs.items()}

    traced = {DEFAULT: tf.function(serve, autograph=False).get_concrete_function(**inputs.specs)}
    outputs = traced[DEFAULT].structured_outputs
    if classify is not None:
        traced["classify"] = _over_examples(
            inputs,
            classify.features,
            _classifier(serve, _choose(outputs, classify.scores, "Classify"), classify.labels),
        )
    if regress is not None:
        chosen = _choose(outputs, regress.output, "Regress")
        traced["regress"] = _over_examples(
            inputs,
            regress.features,
            lambda tensors: {"outputs": tf.reshape(tf.cast(serve(**tensors)[chosen], tf.float32), [-1])},
        )
    return traced, serve


def _classifier(serve: Callable[..., Any], chosen: str, labels: Sequence[str] | None) -> Callable[..., Any]:
    import tensorflow as tf

    def run(tensors: Mapping[str, Any]) -> dict[str, Any]:
        scores = tf.cast(serve(**tensors)[chosen], tf.float32)
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

    parsed_as = dict(features) if features is not None else {n: _feature(n, s) for n, s in inputs.specs.items()}
    if set(parsed_as) != set(inputs.specs):
        raise ExportError(
            f"features maps every input to a tf.io feature. Received: {sorted(parsed_as)}; "
            f"the inputs are {sorted(inputs.specs)}."
        )

    def serve_examples(inputs_: Any) -> dict[str, Any]:
        parsed = tf.io.parse_example(inputs_, parsed_as)
        return run({name: _cast(parsed[name], spec.dtype) for name, spec in inputs.specs.items()})

    # The server looks the argument up as `inputs`.
    return tf.function(lambda inputs: serve_examples(inputs), autograph=False).get_concrete_function(
        inputs=tf.TensorSpec([None], tf.string, name="inputs")
    )


def _feature(name: str, spec: Any) -> Any:
    import tensorflow as tf

    shape = spec.shape.as_list()[1:]
    if None in shape:
        raise ExportError(
            f"A tf.Example feature has a fixed shape. Received: input {name!r} of shape {spec.shape}. "
            f"Give features={{{name!r}: tf.io...}} to Classify or Regress."
        )
    if spec.dtype.name == "string":
        return tf.io.FixedLenFeature(shape, tf.string)
    return tf.io.FixedLenFeature(shape, tf.float32 if spec.dtype.is_floating else tf.int64)


def _cast(tensor: Any, dtype: Any) -> Any:
    import tensorflow as tf

    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _choose(outputs: Mapping[str, Any], name: str | None, who: str) -> str:
    if name is None and len(outputs) == 1:
        return next(iter(outputs))
    if name not in outputs:
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


def _servable(name: str, tensor: Any, float32: bool) -> Any:
    import tensorflow as tf

    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        raise ExportError(
            f"A serving signature answers dense tensors. Received: output {name!r}, {type(tensor).__name__}. "
            f"Call .to_tensor() or tf.sparse.to_dense in the model."
        )
    tensor = tf.convert_to_tensor(tensor)
    if float32 and tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tensor, tf.float32)
    return tf.identity(tensor)
