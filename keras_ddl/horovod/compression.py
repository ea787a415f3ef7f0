"""Gradients that travel in 16 bits."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf


class Compressor:
    """What `compression=` takes; derive from it for a compression of one's own. By itself it leaves tensors alone."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns what travels, equal in shape and dtype on all ranks, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns what has travelled, in the form it had before."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""


class _CastCompressor(Compressor):
    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.dtype.is_floating or tensor.dtype.size <= cls.dtype.size:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """float32 and float64 travel as float16: 11 bits of precision, up to 65504."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """float32 and float64 travel as bfloat16: 8 bits of precision, the range of float32."""

    dtype = tf.bfloat16


class Compression:
    """The compressions there are. Integers and floats of 16 bits travel as they are with all of them."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
