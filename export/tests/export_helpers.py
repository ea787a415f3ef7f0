"""Exports models as training does, and runs them as TensorFlow Serving and as tf.saved_model.load do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from export_zoo import disturb

from keras_ddl import export, model_state
from keras_ddl.serving.prediction.servable import Servable


def ask(path: Path, signature: str = "serving_default", **feed: Any) -> dict[str, np.ndarray]:
    """Returns a server's outputs, from the SignatureDef; checks that tf.saved_model.load's function gives the same."""
    servable = Servable(path, "model", 1)
    found = servable.signature(signature)
    feed = {name: np.asarray(value, object if isinstance(value, list) else None) for name, value in feed.items()}
    assert set(feed) == set(found.inputs)
    fetches = sorted(found.outputs)
    answers = dict(zip(fetches, servable.run(found, feed, fetches)))
    loaded = tf.saved_model.load(str(path))  # kept, because a function does not keep the variables alive
    function = loaded.signatures[signature]
    from_function = function(**{name: tf.constant(value) for name, value in feed.items()})
    assert set(from_function) == set(answers)
    for name, tensor in from_function.items():
        if tensor.dtype == tf.string:
            np.testing.assert_array_equal(answers[name], tensor.numpy())
        else:
            np.testing.assert_allclose(answers[name], tensor.numpy(), rtol=1e-5, atol=1e-6)
        assert function.structured_outputs[name].dtype == answers[name].dtype
        assert function.structured_outputs[name].shape.is_compatible_with(answers[name].shape)
        info = found.outputs[name]
        assert tf.as_dtype(info.dtype) == answers[name].dtype
        assert tf.TensorShape(info.tensor_shape).as_list() == function.structured_outputs[name].shape.as_list()
    return answers


def exported(model: Any, folder: Path, sample: Any, base: dict[str, Any] | None = None, **options: Any) -> Any:
    """Traces, changes the weights as training does, saves, and exports."""
    written = export.write_base_graph(model, folder, sample=sample, **(base or {}))
    disturb(model)
    saved = model_state.save_checkpoint(model, folder, 1, base=written)
    assert saved.state["base"]["agrees"], saved.state["base"]
    return export.export_saved_model(folder, folder / "out", validate="here", **options)
