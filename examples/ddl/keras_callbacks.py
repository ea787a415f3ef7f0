"""Digits with tf.keras, whose optimizers average gradients over ranks, and DDL's two callbacks.

ddlrun --accelerators 2 python examples/ddl/keras_callbacks.py
"""

import argparse

import numpy as np
from _digits import load
from tensorflow import keras

import ddl  # DDL: joins the other ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    (images, labels), held_out = load()
    images, labels = (np.array_split(each, ddl.size())[ddl.rank()] for each in (images, labels))  # DDL: own part

    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05 * ddl.size(), momentum=0.9)  # DDL: a higher rate for the larger global batch
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()]  # DDL: average logs; start alike
    model.fit(
        images,
        labels,
        batch_size=32,
        # DDL: all ranks take the same number of steps, although some may have one more row.
        steps_per_epoch=1437 // ddl.size() // 32,
        epochs=arguments.epochs,
        verbose=2 if ddl.rank() == 0 else 0,
        callbacks=callbacks,
    )
    if ddl.rank() == 0:
        accuracy = model.evaluate(*held_out, verbose=0)[1]
        print(f"{ddl.size()} rank(s), held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
