"""Compression of gradients to 16 bits."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf


class Compressor:
    """Base class for `compression=`, also for custom compressions. It does not compress."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns (tensor to send, equal in shape and dtype on all ranks; context for `decompress`)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns a received tensor in its original form."""
        return tensor


class NoneCompressor(Compressor):
    """No compression."""


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
    """Sends float32 and float64 as float16: 11 bits of precision, up to 65504."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Sends float32 and float64 as bfloat16: 8 bits of precision, the range of float32."""

    dtype = tf.bfloat16


class Compression:
    """The available compressions. None of them changes integers and 16-bit floats."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
