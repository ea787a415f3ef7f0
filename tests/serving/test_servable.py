"""A version in memory: what clients ask for does not pile up in it."""

import itertools

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving import servable as servable_module
from keras_ddl.serving.servable import Servable
from keras_ddl.serving.tensors import outputs_of


def test_choices_of_outputs_do_not_pile_up(tmp_path, monkeypatch):
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
            assert fetches == outputs_of(signature, wanted[::-1])  # their order does not matter
            assert served.run(signature, feeds, fetches) == [2.0 + int(alias[1]) for alias in fetches]
            assert len(served._callables) <= 3
    first = list(signature.outputs)[:1]
    assert ("serving_default", tuple(first)) not in served._callables  # it went
    assert served.close()


def test_a_large_array_that_begins_anywhere_in_a_message_is_copied_once(tmp_path, monkeypatch):
    module = tf.Module()
    module.serve = tf.function(lambda x: {"y": x + 1.0})
    signature = module.serve.get_concrete_function(tf.TensorSpec([None, 3], tf.float32, "x"))
    tf.saved_model.save(module, str(tmp_path / "1"), {"serving_default": signature})
    served = Servable(tmp_path / "1", "m", 1)
    made, taken = served._callable, []

    def watched(*arguments):
        call = made(*arguments)
        return lambda *feeds: taken.extend(feeds) or call(*feeds)

    monkeypatch.setattr(served, "_callable", watched)
    values = np.arange(30_000, dtype=np.float32).reshape(-1, 3)
    message = np.empty(values.nbytes + 128, np.uint8)
    for offset in range(8):
        message[offset : offset + values.nbytes] = values.reshape(-1).view(np.uint8)
        x = np.frombuffer(memoryview(message)[offset : offset + values.nbytes], np.float32).reshape(values.shape)
        (y,) = served.run(served.signature(""), {"x": x}, ["y"])
        np.testing.assert_array_equal(y, values + 1)
        (feed,) = taken
        if x.flags.aligned:
            assert feed is x  # TensorFlow may copy it, NumPy does not
        else:
            assert feed.flags.aligned and feed.ctypes.data % 64 == 0  # which neither of them copies
        taken.clear()
    assert served.close()
