"""The first half of an export with DDL: saves the base graph before training operations are added to it.

ddlrun --accelerators 2 python examples/ddl/export_train.py
python examples/ddl/export_saved_model.py
"""

import os

import numpy as np
import tensorflow.compat.v1 as tf
from _digits import load

tf.disable_v2_behavior()
RESULTS = os.environ.get("RESULT_DIR", "export-output")
PATH = os.path.join(RESULTS, "digits")  # noqa: PTH118


def variable(shape):
    return tf.Variable(tf.truncated_normal(shape, stddev=0.1))


x = tf.placeholder(tf.float32, [None, 64], name="x")
hidden = tf.nn.relu(tf.matmul(x, variable([64, 64])) + variable([64]))
keep = tf.placeholder_with_default(1.0, shape=(), name="keep")
logits = tf.identity(tf.matmul(tf.nn.dropout(hidden, keep_prob=keep), variable([64, 10])), name="logits")

if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
    tf.gfile.MakeDirs(RESULTS)
    tf.train.export_meta_graph(PATH + "_basegraph.meta", as_text=True)

import ddl  # noqa: E402  (DDL: after the base graph has been written, as in IBM's recipe)

y = tf.placeholder(tf.int64, [None])
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
train = tf.train.AdamOptimizer(0.002 * ddl.size()).minimize(loss)
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))

(images, labels), held_out = load()
saver = tf.train.Saver()
order = np.random.RandomState(7)
with tf.Session(config=tf.ConfigProto()) as session:
    session.run(tf.global_variables_initializer())
    for _ in range(300):
        rows = order.randint(len(images), size=32 * ddl.size())
        rows = np.split(rows, ddl.size())[ddl.rank()]  # DDL: this rank's part of one batch
        session.run(train, {x: images[rows], y: labels[rows], keep: 0.8})
    if ddl.rank() == 0:
        saver.save(session, PATH, global_step=300)
        np.savez(PATH + "_held_out.npz", images=held_out[0], logits=session.run(logits, {x: held_out[0]}))
        print(f"{ddl.size()} rank(s), held-out accuracy {session.run(accuracy, {x: held_out[0], y: held_out[1]}):.3f}")
