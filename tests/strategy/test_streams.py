"""Serialized messages and errors of rank 0's data stream; needs no ranks."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import from_rank_0, streams
from keras_ddl.data.streams import BATCH, END, Message
from keras_ddl.errors import RankMismatchError


def test_messages_survive_packing():
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(7, 3)),
        rng.normal(size=(7, 3)).astype("float16")[2:5],
        np.zeros((0, 4), "int32"),
        np.asarray(2.5),
        np.array([b"", b"a row"], object),
        rng.normal(size=(4, 5)).T,
        rng.integers(0, 2, 100_000) > 0,
    ]
    messages = [Message(BATCH, arrays), None, Message(END), Message(BATCH, [])]
    data, lengths = streams.packed(messages)
    assert lengths[1] == 0 and sum(lengths) == len(data)
    ends = np.cumsum(lengths)
    found = [streams.unpacked(data[end - length : end]) for end, length in zip(ends, lengths) if length]
    at_an_odd_address = np.concatenate([np.zeros(1, np.uint8), data[: lengths[0]]])[1:]
    assert streams.unpacked(at_an_odd_address).kind == BATCH
    assert [each.kind for each in found] == [BATCH, END, BATCH] and found[2].content == []
    for mine, one in zip(found[0].content, arrays, strict=True):
        assert (mine.dtype, mine.shape) == (one.dtype, one.shape)
        np.testing.assert_array_equal(mine, one)
    assert np.shares_memory(found[0].content[0], data), "contiguous arrays are not copied again"


def test_stream_error_is_recovered_from_tensorflows_error():
    error = RankMismatchError("All ranks must.")
    text = f"UNKNOWN: StreamError: {streams.StreamError('data/3/1', error)}\nTraceback ..."
    assert streams.failure_in(text) is error
    assert streams.failure_in(text) is None and streams.failure_in("another error") is None


def test_source_is_freed_with_its_dataset():
    """TensorFlow keeps the functions of every dataset until the process ends."""
    source = tf.data.Dataset.range(4).batch(2)
    one_rank = SimpleNamespace(rank=0, size=1)
    dataset = from_rank_0.DatasetFromRank0(source, source.element_spec, 2, "dataset", one_rank)
    kept = weakref.ref(source)
    del source
    gc.collect()
    assert kept() is not None, "its dataset may still be read"
    del dataset
    gc.collect()
    assert kept() is None
