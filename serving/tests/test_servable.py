"""A loaded version: requests do not accumulate objects in it."""

import itertools

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.prediction import servable as servable_module
from keras_ddl.serving.prediction.servable import Servable
from keras_ddl.serving.prediction.tensors import outputs_of


def test_output_choices_do_not_accumulate(tmp_path, monkeypatch):
    monkeypatch.setattr(servable_module, "_CALLABLES", 3)
    module = tf.Module()
    module.serve = tf.function(lambda x: {f"y{i}": x + i for i in range(3)})
    signature = module.serve.get_concrete_function(tf.TensorSpec([], tf.float32, "x"))
    tf.saved_model.save(module, str(tmp_path / "1"), {"serving_default": signature})
    served = Servable(tmp_path / "1", "m", 1)
    signature = served.signature("")
    feeds = {"x": tf.constant(2.0).numpy()}
    for count in (1, 2, 3):
        for wanted in itertools.permutations(signature.outputs, count):
            fetches = outputs_of(signature, wanted)
            assert fetches == outputs_of(signature, wanted[::-1])  # the order of outputs does not matter
            assert served.run(signature, feeds, fetches) == [2.0 + int(alias[1]) for alias in fetches]
            assert len(served._callables) <= 3
    first = list(signature.outputs)[:1]
    assert ("serving_default", tuple(first)) not in served._callables  # evicted
