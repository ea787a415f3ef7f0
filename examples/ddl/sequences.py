"""Sequence to sequence with one graph each for training, evaluation and inference, as in TensorFlow's NMT tutorial.

    ddlrun --accelerators 2 python examples/ddl/sequences.py --output-dir sequences-output

The model learns to write a sequence backwards. All ranks train. Only rank 0 writes checkpoints, restores them into the
graphs for evaluation and inference, and runs these graphs, so they are built with DDL's broadcast off.
"""

import argparse
import collections
import contextlib
import os

import numpy as np
import tensorflow.compat.v1 as tf

import ddl  # DDL: joins the other ranks

tf.disable_v2_behavior()

TOKENS, LENGTH, UNITS, START = 6, 4, 64, 6
Model = collections.namedtuple("Model", "graph source target loss train step output saver")


def gru(name, x, state):
    """Returns the next state of a gated recurrent unit (Cho et al., 2014)."""
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        width = x.shape[1] + UNITS
        gates = tf.sigmoid(
            tf.matmul(tf.concat([x, state], 1), tf.get_variable("gates", [width, 2 * UNITS]))
            + tf.get_variable("gates_bias", [2 * UNITS], initializer=tf.ones_initializer())
        )
        reset, update = tf.split(gates, 2, axis=1)
        candidate = tf.tanh(
            tf.matmul(tf.concat([x, reset * state], 1), tf.get_variable("candidate", [width, UNITS]))
            + tf.get_variable("candidate_bias", [UNITS], initializer=tf.zeros_initializer())
        )
        return update * state + (1 - update) * candidate


def build(mode):
    """Returns the model's graph for mode "train", "evaluate" or "infer"; all have the same variables."""
    with tf.Graph().as_default() as graph:
        source = tf.placeholder(tf.int32, [None, LENGTH])
        target = tf.placeholder(tf.int32, [None, LENGTH])
        embedding = tf.get_variable("embedding", [TOKENS + 1, UNITS])
        projection = tf.get_variable("projection", [UNITS, TOKENS])
        state = tf.zeros([tf.shape(source)[0], UNITS])
        for position in range(LENGTH):
            state = gru("encoder", tf.nn.embedding_lookup(embedding, source[:, position]), state)
        token = tf.fill([tf.shape(source)[0]], START)
        losses, output = [], []
        for position in range(LENGTH):
            state = gru("decoder", tf.nn.embedding_lookup(embedding, token), state)
            logits = tf.matmul(state, projection)
            output.append(tf.argmax(logits, 1, output_type=tf.int32))
            truth = target[:, position]
            losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=truth, logits=logits))
            token = output[-1] if mode == "infer" else truth
        loss = tf.reduce_mean(losses)
        step = tf.train.get_or_create_global_step()
        train = None
        if mode == "train":
            parameters = tf.trainable_variables()
            clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, parameters), 5.0)
            optimizer = tf.train.AdamOptimizer(0.005)
            train = optimizer.apply_gradients(zip(clipped, parameters), global_step=step)
        saver = tf.train.Saver([*tf.trainable_variables(), step])
        return Model(graph, source, target, loss, train, step, tf.stack(output, 1), saver)


@contextlib.contextmanager
def one_rank_only():
    """DDL: lets this rank make variables without the other ranks."""
    ddl.disable_broadcast()
    yield
    ddl.enable_broadcast()


def load_or_create(model, session, folder):
    """Restores the newest checkpoint, or initializes variables, as in NMT."""
    newest = tf.train.latest_checkpoint(folder)
    with model.graph.as_default():
        session.run(tf.global_variables_initializer())
    if newest:
        model.saver.restore(session, newest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--output-dir", default="sequences-output")
    arguments = parser.parse_args()

    training = build("train")
    with one_rank_only():
        evaluation, inference = build("evaluate"), build("infer")
    held_out = np.random.RandomState(99).randint(TOKENS, size=[200, LENGTH])
    order = np.random.RandomState(ddl.rank())  # DDL: each rank has different sequences

    sessions = [tf.Session(graph=model.graph) for model in (training, evaluation, inference)]
    with sessions[0], sessions[1], sessions[2]:
        with training.graph.as_default():
            sessions[0].run(tf.global_variables_initializer())
        for step in range(1, arguments.steps + 1):
            rows = order.randint(TOKENS, size=[64, LENGTH])
            sessions[0].run(training.train, {training.source: rows, training.target: rows[:, ::-1]})
            if step % arguments.evaluate_every == 0 and ddl.rank() == 0:  # DDL: only rank 0 evaluates
                tf.gfile.MakeDirs(arguments.output_dir)
                path = os.path.join(arguments.output_dir, "model")  # noqa: PTH118
                training.saver.save(sessions[0], path, global_step=step)
                for model, session in ((evaluation, sessions[1]), (inference, sessions[2])):
                    load_or_create(model, session, arguments.output_dir)
                feed = {evaluation.source: held_out, evaluation.target: held_out[:, ::-1]}
                loss, at = sessions[1].run([evaluation.loss, evaluation.step], feed)
                written = sessions[2].run(inference.output, {inference.source: held_out})
                right = np.mean(np.all(written == held_out[:, ::-1], axis=1))
                print("step %d: loss %.4f, %.3f of the sequences right" % (at, loss, right), flush=True)  # noqa: UP031


if __name__ == "__main__":
    main()
