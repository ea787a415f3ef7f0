"""Shapes, slices, what is put together and repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cut.operations.cases import case, rows_of, with_gradients

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops


@case("Shape", "ShapeN", "Size", "Rank")
def shapes(x: Any) -> Any:
    s = tf.reduce_sum(x, 0)
    both = raw.ShapeN(input=[x, tf.transpose(x), s])
    return [
        raw.Shape(input=x),
        *both,
        raw.Size(input=x),
        raw.Rank(input=x),
        raw.Shape(input=s),
        raw.Shape(input=x[0, 0]),
    ]


@case("Reshape", "ExpandDims", "Squeeze", "Transpose", "ConjugateTranspose", "BroadcastTo", "Fill", "EnsureShape")
def shaped(x: Any) -> Any:
    rows, cube, s = tf.shape(x)[0], rows_of(x, 2, 3), tf.reduce_sum(x, 0)
    flat = tf.reshape(cube, [-1, 3])
    found = [
        flat,
        tf.reshape(flat, [rows, 2, 3]),
        tf.reshape(flat, [-1]),
        tf.reshape(tf.transpose(x), [-1]),
        tf.reshape(s, [3, 1]),
    ]
    found += [
        tf.reshape(tf.transpose(cube, [1, 0, 2]), [-1, 3]),
        tf.reshape(tf.transpose(x), [3, rows, 1]),
        tf.reshape(x, [3, -1]),
    ]
    found += [tf.reshape(tf.tile(x, [2, 1]), [2, rows, 3]), tf.reshape(tf.tile(x, [2, 1]), [rows, 2, 3])]
    found += [
        x[:, None],
        tf.expand_dims(x, -1),
        tf.expand_dims(s, 0),
        tf.squeeze(x[:, :1], 1),
        tf.squeeze(x[:, None]),
        tf.squeeze(s[None]),
    ]
    found += [
        tf.transpose(cube, [2, 0, 1]),
        tf.transpose(cube, [-1, 0, -2]),
        tf.transpose(s),
        tf.transpose(tf.reduce_max(cube, 0)),
        tf.squeeze(x[:, None], [-2]),
    ]
    c = tf.transpose(tf.complex(x, x), conjugate=True)
    found += [
        tf.math.real(c),
        tf.math.imag(c),
        tf.broadcast_to(x[:, None], [rows, 4, 3]),
        tf.broadcast_to(s, [rows, 3]),
        tf.broadcast_to(x, [2, rows, 3]),
    ]
    found += [
        tf.ensure_shape(x, [None, 3]),
        tf.ensure_shape(s, [3]),
        tf.fill([rows, 3], tf.reduce_sum(x)) * x,
        tf.fill([rows], 2.0),
    ]
    ones = tf.fill([rows, 3], tf.constant(2.0, tf.float64))
    return [
        *found,
        tf.concat([ones * 3, x], 1),
        tf.concat([x, tf.broadcast_to(tf.constant([[7.0]], tf.float64), [rows, 1])], 1),
    ]


@case("StridedSlice", "StridedSliceGrad", "Slice")
def sliced(x: Any) -> Any:
    rows, cube = tf.shape(x)[0], rows_of(x, 2, 3)
    both = tf.concat([x, x * 2, x * 3], 0)
    parts: list[Callable[[Any], Any]] = [
        lambda v: v[:, 1:],
        lambda v: v[1:],
        lambda v: v[::-1],
        lambda v: v[::2],
        lambda v: v[:, ::-1],
        lambda v: v[..., 0],
        lambda v: v[0],
        lambda v: v[-1],
        lambda v: v[None, :, 1],
        lambda v: v[:, None],
        lambda v: v[0:rows],
        lambda v: v[:100],
        lambda v: v[:, :0],
        lambda v: v[3:2],
        lambda v: v[..., None, 0],
        lambda v: v[:, -2:],
        lambda v: v[-1:],
        lambda v: v[:-1],
    ]
    found = [each for part in parts for v in (x, cube) for each in with_gradients(part, v)]
    found += [part(tf.tile(tf.transpose(x), [1, 3])) for part in parts]
    for part in (
        lambda v: v[:rows],
        lambda v: v[rows:],
        lambda v: v[rows : 2 * rows],
        lambda v: v[rows:, 1],
        lambda v: v[1:],
    ):
        found += with_gradients(part, both)
    s = tf.reduce_sum(cube, 0)
    found += [
        s[0],
        s[:, 1:],
        *with_gradients(lambda v: v[1:], s),
        *with_gradients(lambda v: tf.reduce_sum(v, 0)[0], cube),
    ]
    found += [
        tf.slice(x, [0, 1], [-1, 2]),
        tf.slice(x, [0, 1], [rows, 1]),
        tf.slice(x, [0, 0], [1, 2]),
        tf.slice(s, [1, 0], [1, 2]),
    ]
    return found


@case("ConcatV2", "Pack", "Unpack", "Split", "SplitV")
def put_together(x: Any) -> Any:
    rows, s, m = tf.shape(x)[0], tf.reduce_sum(x, 0), tf.reduce_max(x, 0)
    fixed = tf.constant(np.arange(15.0).reshape(5, 3))
    found = [
        tf.concat([x, fixed], 0),
        tf.concat([fixed, x, x], 0),
        tf.concat([x, x * 2], 1),
        tf.concat([x, tf.ones_like(x)], -1),
    ]
    found += [
        tf.concat([s, s], 0),
        tf.concat([s, m], 0),
        tf.concat([s[None], x], 0),
        tf.concat([tf.transpose(x), tf.transpose(x)], 1),
    ]
    for axis in (0, 1, 2, -1):
        found += [tf.stack([x, x * 2], axis), tf.stack([x, tf.zeros_like(x)], axis)]
    found += [
        tf.stack([s, s]),
        tf.stack([s, m], 1),
        tf.stack([x[0], s]),
        *tf.unstack(x, axis=1),
        *tf.unstack(s),
        *tf.unstack(m),
    ]
    found += [
        *tf.unstack(tf.transpose(x)),
        *tf.split(x, 3, 1),
        *tf.split(x, [1, 2], 1),
        *tf.split(s, [2, 1]),
        *tf.split(s, 3),
    ]
    both = tf.concat([x, x * 3], 0)
    found += [*tf.split(both, 2), *tf.split(both, [rows, rows]), *tf.split(tf.concat([both, both], 0), 2), both[:rows]]
    wide = tf.reshape(rows_of(x, 2, 2), [-1, 2])
    return [
        *found,
        *tf.split(wide, 2),
        tf.concat([wide, wide], 0),
        tf.concat([wide, x[:, :2]], 0),
        tf.concat([x[:, :2], wide], 0),
    ]


@case("Roll", "ReverseSequence")
def shifted(x: Any) -> Any:
    found = with_gradients(lambda v: tf.roll(v, [1, -2], [1, 2]), rows_of(x, 3, 4)) + [tf.roll(x, 1, 0)]
    lengths = tf.cast(tf.reduce_sum(tf.cast(x > 0, tf.int32), 1), tf.int32)
    found += with_gradients(lambda v: tf.reverse_sequence(v, lengths, 1), rows_of(x, 3, 2))
    return [*found, tf.reverse_sequence(tf.transpose(x), lengths, 0, 1), tf.roll(tf.reduce_sum(x, 0), 1, 0)]


@case("Pad", "PadV2", "MirrorPad", "MirrorPadGrad", "Tile", "ReverseV2")
def repeated(x: Any) -> Any:
    cube = rows_of(x, 3, 4)
    found = [tf.pad(x, [[0, 0], [1, 2]]), tf.pad(x, [[1, 0], [0, 0]]), tf.pad(x, [[0, 0], [1, 0]], constant_values=3.0)]
    for mode in ("REFLECT", "SYMMETRIC"):
        found += with_gradients(lambda v, mode=mode: tf.pad(v, [[0, 0], [1, 1], [2, 0]], mode), cube)
    found += with_gradients(lambda v: tf.tile(v, [1, 2]), x) + with_gradients(lambda v: tf.tile(v, [3, 1]), x)
    found += [
        tf.tile(tf.reduce_sum(x, 0), [2]),
        tf.tile(tf.transpose(x), [2, 2]),
        tf.tile(x, [0, 1]),
        tf.tile(x, tf.argmax(x[0, :2]) * [0, 1] + 1),
    ]
    found += [
        tf.tile(x[:, None], [1, 2, 1]),
        tf.repeat(x, 2, 0),
        tf.reverse(x, [1]),
        tf.reverse(x, [0]),
        tf.reverse(tf.transpose(x), [-1, 0]),
    ]
    return [*found, tf.pad(tf.reduce_sum(x, 0), [[1, 1]])]
