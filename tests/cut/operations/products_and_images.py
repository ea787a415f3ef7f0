"""Products of tensors, convolutions, pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
from cut.operations.cases import case, rows_of, with_gradients

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops


@case("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "BiasAdd", "BiasAddGrad")
def products(x: Any) -> Any:
    w = tf.constant(np.arange(12.0).reshape(3, 4) - 5)
    inf = tf.constant([[np.inf, 1.0], [2.0, 3.0], [-1.0, 0.0]], tf.float64)
    cube = tf.reshape(tf.matmul(x, w), [-1, 2, 2])
    c = tf.complex(x, x * 2)
    gram = tf.matmul(x, x, transpose_a=True)
    found = [x @ w, tf.matmul(x, x, transpose_b=True), gram, gram @ w, gram @ inf, tf.matmul(x, gram, transpose_b=True)]
    found += [tf.matmul(w, gram, transpose_a=True), tf.matmul(gram, gram)]
    found += [raw.BatchMatMul(x=cube, y=cube, adj_x=True), tf.matmul(cube, cube, adjoint_b=True)]
    found += [tf.matmul(cube, w[:2, :2]), tf.matmul(w[:1, :2][None], cube), tf.matmul(cube, gram[None, :2, :2])]
    found += [raw.BatchMatMulV3(x=cube, y=cube, Tout=tf.float64), tf.matmul(cube[:, None], cube[None])]
    found += [tf.matmul(tf.transpose(cube, [1, 2, 0]), tf.transpose(cube, [1, 0, 2]))]
    found += [tf.einsum("ni,nj->ij", x, x), tf.einsum("ni,ij->nj", x, w), tf.einsum("...i,ij->...j", cube, w[:2])]
    found += [tf.einsum("ni,mi->nm", x, x), tf.einsum("nij->jn", cube), tf.einsum("nij->i", cube)]
    found += [tf.einsum("ni,i->", x, inf[:, 0]), tf.einsum("ij,ni->j", inf, x)]
    found += [tf.einsum("nij,nkj->nik", cube, cube), tf.einsum("ni,n->i", x, x[:, 0]), tf.einsum("ij->ji", gram)]
    bias = tf.constant([1.0, 2.0, 3.0], tf.float64)
    found += [tf.nn.bias_add(x, bias), tf.nn.bias_add(x, tf.reduce_sum(x, 0)), tf.nn.bias_add(gram, bias)]
    found += [
        raw.BiasAddGrad(out_backprop=x),
        raw.BiasAddGrad(out_backprop=gram),
        tf.nn.bias_add(tf.transpose(gram), x[0]),
    ]
    images = tf.reshape(cube, [-1, 2, 2, 1]) * bias
    found += [
        raw.BiasAddGrad(out_backprop=images),
        raw.BiasAdd(value=tf.transpose(images, [0, 3, 1, 2]), bias=bias, data_format="NCHW"),
    ]
    found += [raw.BiasAddGrad(out_backprop=tf.transpose(images, [0, 3, 1, 2]), data_format="NCHW")]
    complexes = [
        tf.matmul(c, c, adjoint_a=True),
        tf.matmul(c[:, None], c[:, None], adjoint_b=True),
        tf.einsum("ni,nj->ij", c, c),
    ]
    whole = [tf.cast(x * 10, tf.int32), tf.cast(x * 10, tf.int32)]
    found.append(tf.matmul(whole[0], whole[1], transpose_a=True))
    return found + [each for c in complexes for each in (tf.math.real(c), tf.math.imag(c))]


def _filter(*shape: int) -> Any:
    return tf.constant(np.cos(np.arange(np.prod(shape), dtype=float)).reshape(shape))


@case("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
def conv_2d(x: Any) -> Any:
    found = with_gradients(
        lambda a, k: tf.nn.conv2d(a, k, [1, 2, 1, 1], "SAME"), rows_of(x, 5, 4, 2), _filter(3, 2, 2, 3)
    )
    shape = tf.stack([tf.shape(x)[0], 5, 4, 2])
    found += [tf.nn.conv2d_transpose(rows_of(x, 5, 4, 3), _filter(3, 2, 2, 3), shape, 1)]
    return found


@case("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2")
def conv_3d(x: Any) -> Any:
    return with_gradients(
        lambda a, k: tf.nn.conv3d(a, k, [1] * 5, "VALID"), rows_of(x, 3, 3, 2, 1), _filter(2, 2, 2, 1, 2)
    )


@case("DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter")
def depthwise(x: Any) -> Any:
    return with_gradients(
        lambda a, k: tf.nn.depthwise_conv2d(a, k, [1] * 4, "SAME"), rows_of(x, 4, 3, 2), _filter(2, 2, 2, 2)
    )


@case("ExtractImagePatches", "AdjustContrastv2", "AdjustHue", "AdjustSaturation")
def adjusted(x: Any) -> Any:
    images = tf.cast(tf.sigmoid(rows_of(x, 4, 4, 3)), tf.float32)
    found = [tf.image.adjust_contrast(images, 2.0), tf.image.adjust_hue(images, 0.1)]
    patches = tf.image.extract_patches(images, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID")
    return [*found, tf.image.adjust_saturation(images, 0.5), patches]


@case("SpaceToBatchND", "BatchToSpaceND")
def dilated(x: Any) -> Any:
    kernel = tf.reshape(tf.sin(tf.range(18.0, dtype=x.dtype)), [3, 3, 2, 1])
    return with_gradients(
        lambda v, k: tf.nn.depthwise_conv2d(v, k, [1] * 4, "SAME", dilations=[2, 2]), rows_of(x, 5, 5, 2), kernel
    )


@case("Dilation2D", "LRN", "LRNGrad", "SpaceToDepth", "DepthToSpace")
def of_images(x: Any) -> Any:
    images = rows_of(x, 4, 4, 4)
    single = tf.cast(images, tf.float32)
    found = with_gradients(lambda a: tf.nn.local_response_normalization(a, 2), single)
    found += [raw.Dilation2D(input=images, filter=_filter(2, 2, 4), strides=[1] * 4, rates=[1] * 4, padding="SAME")]
    return found + [tf.nn.space_to_depth(images, 2), tf.nn.depth_to_space(images, 2)]


@case("MaxPool", "MaxPoolGrad", "MaxPoolGradGrad", "AvgPool", "AvgPoolGrad")
def pools(x: Any) -> Any:
    images = rows_of(x, 4, 4, 2)
    found = with_gradients(lambda a: tf.nn.max_pool2d(a, 2, 2, "VALID"), images)
    found += with_gradients(lambda a: tf.nn.avg_pool2d(a, 3, 2, "SAME"), images)
    out = tf.nn.max_pool2d(images, 2, 2, "VALID")
    numbers = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    return [*found, raw.MaxPoolGradGrad(orig_input=images, orig_output=out, grad=images * 2, **numbers)]


@case("MaxPool3D", "MaxPool3DGrad", "AvgPool3D", "AvgPool3DGrad")
def pools_3d(x: Any) -> Any:
    single = tf.cast(rows_of(x, 4, 2, 2, 1), tf.float32)
    found = with_gradients(lambda a: tf.nn.avg_pool3d(a, 2, 2, "SAME"), single)
    return found + with_gradients(lambda a: tf.nn.max_pool3d(a, 2, 2, "SAME"), single)


@case("ResizeBilinear", "ResizeBilinearGrad", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad")
@case("ResizeBicubic", "ResizeBicubicGrad", "ResizeArea", "ScaleAndTranslate")
def resized(x: Any) -> Any:
    images = rows_of(x, 3, 4, 2)
    found = []
    for method in ("bilinear", "nearest", "bicubic"):
        found += with_gradients(
            lambda a, method=method: tf.cast(tf.image.resize(a, [5, 6], method), tf.float64), images
        )
    found += [tf.image.resize(images, [2, 3], "area"), tf.image.resize(images, [2, 3], antialias=True)]
    return found
