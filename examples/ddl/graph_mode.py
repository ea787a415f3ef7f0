"""Learns digits in graph mode, like a TensorFlow 1 script with a Session and a Saver; DDL needs one more import.

    ddlrun --accelerators 2 python examples/ddl/graph_mode.py --output-dir graph-output

Lines that DDL needs are marked. `--resume` continues from the checkpoint, on any number of ranks.
"""

import argparse
import os

import numpy as np
import tensorflow.compat.v1 as tf
from _digits import load

import ddl  # DDL: joins the other ranks, and from here on optimizers average gradients over them

tf.disable_v2_behavior()


def dense(x, units, name):
    with tf.variable_scope(name):
        w = tf.get_variable("w", [x.shape[1], units], initializer=tf.glorot_uniform_initializer())
        b = tf.get_variable("b", [units], initializer=tf.zeros_initializer())
    return tf.matmul(x, w) + b


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of one rank")
    parser.add_argument("--output-dir", default="graph-output")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    (images, labels), held_out = load()
    images, labels = images[ddl.rank() :: ddl.size()], labels[ddl.rank() :: ddl.size()]  # DDL: each rank has its part

    x = tf.placeholder(tf.float32, [None, 64])
    y = tf.placeholder(tf.int64, [None])
    logits = dense(tf.nn.relu(dense(x, 64, "hidden")), 10, "digit")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
    step = tf.train.get_or_create_global_step()
    optimizer = tf.train.MomentumOptimizer(0.05 * ddl.size(), 0.9)  # DDL: all ranks together have a larger batch
    train = optimizer.minimize(loss, global_step=step)

    saver = tf.train.Saver()
    checkpoint = os.path.join(arguments.output_dir, "digits")  # noqa: PTH118
    order = np.random.RandomState(ddl.rank())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        if arguments.resume:
            saver.restore(session, checkpoint)
            print("rank", ddl.rank(), "continues from step", session.run(step), flush=True)
        for _ in range(arguments.steps):
            rows = order.randint(len(images), size=arguments.batch_size)
            session.run(train, {x: images[rows], y: labels[rows]})
        if ddl.rank() == 0:  # DDL: one rank writes and prints
            tf.gfile.MakeDirs(arguments.output_dir)
            saver.save(session, checkpoint)
            result = session.run(accuracy, {x: held_out[0], y: held_out[1]})
            print("step %d, %d rank(s), held-out accuracy %.3f" % (session.run(step), ddl.size(), result))  # noqa: UP031


if __name__ == "__main__":
    main()
