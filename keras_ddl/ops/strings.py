"""Gathers rows of strings, which are sent as the bytes of TensorFlow's serialized tensors."""

from __future__ import annotations

from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ops import raw


def all_gather_strings(tensor: tf.Tensor, name: str | None, comm: Communicator) -> tf.Tensor:
    """Concatenates the rows of strings of all ranks, in the order of the ranks; see `all_gather`.

    Cost: an all-gather of the shapes, and one of the strings' bytes plus one to three bytes per string.
    """
    if not tensor.shape.rank:
        tensor = tf.reshape(
            tensor, tf.concat([tf.ones([1 - tf.minimum(tf.rank(tensor), 1)], tf.int32), tf.shape(tensor)], 0)
        )
    if comm.size == 1:
        return tf.identity(tensor)
    mine = tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
    # Includes the shape of a row, so that ranks with different numbers of dimensions get an error.
    sizes = tf.concat([tf.shape(mine, tf.int64), tf.shape(tensor, tf.int64)[1:]], 0)
    sizes, _ = raw.all_gather(sizes[tf.newaxis], name and f"{name}/sizes", comm)
    gathered, _ = raw.all_gather(mine, name and f"{name}/bytes", comm)
    parts = [tf.io.parse_tensor(_as_string(each), tf.string) for each in tf.split(gathered, sizes[:, 0], num=comm.size)]
    result = tf.concat(parts, 0)
    if tensor.shape.rank is not None:
        result.set_shape([None, *tensor.shape[1:]])
    return result


def _as_string(data: tf.Tensor) -> tf.Tensor:
    """Returns bytes (uint8 [n]) as a string. A serialized tensor ends with its bytes as they are."""
    size = tf.size(data)
    return tf.strings.substr(tf.io.serialize_tensor(data), -size, size)
