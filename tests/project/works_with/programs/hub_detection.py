"""Trains KerasHub's RetinaNet to find rectangles; its loss is divided by the matching anchors of the whole batch."""

import keras
import keras_hub
import numpy as np

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
ROWS, SIDE, BOXES = 10, 64, 3
images = rng.uniform(0.0, 0.2, size=(ROWS, SIDE, SIDE, 3))
corners = rng.integers(0, 26, size=(ROWS, BOXES, 2))
boxes = np.concatenate([corners, corners + rng.integers(26, 38, size=(ROWS, BOXES, 2))], axis=-1).astype("float32")
labels = rng.integers(0, 2, size=(ROWS, BOXES)).astype("float32")
for image, of_image, kinds in zip(images, boxes.astype(int), labels.astype(int)):
    for (top, left, bottom, right), kind in zip(of_image, kinds):
        image[top:bottom, left:right, kind] += 0.7
labels[::2, 2], boxes[::2, 2] = -1, -1  # every other image has two boxes

strategy = keras_ddl.Strategy()
with strategy.scope():
    encoder = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64, 64, 64],
        stackwise_num_blocks=[1, 1, 1, 1],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        image_shape=(SIDE, SIDE, 3),
    )
    backbone = keras_hub.models.RetinaNetBackbone(image_encoder=encoder, min_level=3, max_level=4, use_p5=False)
    model = keras_hub.models.RetinaNetObjectDetector(
        backbone, num_classes=2, bounding_box_format="yxyx", pre_logits_num_conv_layers=1
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=10.0),
        box_loss=keras.losses.Huber(reduction="sum"),
        classification_loss=keras.losses.BinaryFocalCrossentropy(from_logits=True, reduction="sum"),
    )
history = model.fit(images, {"boxes": boxes, "labels": labels}, batch_size=4, epochs=2, verbose=2)
