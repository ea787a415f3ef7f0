"""Exports checkpoints of graph-mode scripts to SavedModels, with and without a base graph."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_ddl import export
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ExportError

v1 = tf.compat.v1
COMMAND = Path(sys.executable).with_name("keras-ddl")
X = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
ROUNDING = {
    "rtol": 1e-6,
    "atol": 1e-6,
}  # grappler fuses differently in sessions and functions, depending on the processor


def train(folder: Path, *, base: bool, resource: bool = True, nan: bool = False) -> np.ndarray:
    """A script: two layers, a table, Python in the training ops, a checkpoint at step 30. Returns logits and labels."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        with v1.variable_scope("net", use_resource=resource):
            hidden = tf.tanh(x @ v1.get_variable("w", [4, 8]) + v1.get_variable("b", [8]))
            keep = v1.placeholder_with_default(1.0, [], name="keep")
            logits = tf.identity(v1.nn.dropout(hidden, keep_prob=keep) @ v1.get_variable("out", [8, 3]), "logits")
        keys = tf.constant([0, 1, 2], tf.int64)
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(keys, tf.constant(["a", "b", "c"])), default_value="?"
        )
        label = tf.identity(table.lookup(tf.argmax(logits, 1)), "label")
        if base:
            v1.train.export_meta_graph(str(folder / "model_basegraph.meta"), as_text=True)
        y = v1.placeholder(tf.int64, [None])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        # Stands for communication in training: an operation that no server has.
        seen = v1.py_func(lambda value: value, [loss], tf.float32)
        seen.set_shape([])
        step = v1.train.AdamOptimizer(0.01).minimize(seen * 0 + loss)
        saver = v1.train.Saver()
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            for _ in range(3):
                session.run(step, {x: X, y: np.arange(5) % 3, keep: 0.8})
            if nan:
                weights = v1.trainable_variables()[0]
                session.run(v1.assign(weights, np.full([4, 8], np.nan)))
            saver.save(session, str(folder / "model"), global_step=30)
            return session.run([logits, label], {x: X})


def served(path: Path, **feed):
    function = tf.saved_model.load(str(path)).signatures["serving_default"]
    return {name: value.numpy() for name, value in function(**{k: tf.constant(v) for k, v in feed.items()}).items()}


@pytest.mark.parametrize("resource", [True, False])
def test_base_graph_is_exported_under_given_names(tmp_path, resource):
    logits, label = train(tmp_path, base=True, resource=resource)
    names = {"inputs": {"rows": "x:0"}, "outputs": {"scores": "net/logits:0", "label": "label"}}
    result = export.export_graph(tmp_path / "model-30", tmp_path / "out", version="step", **names)
    assert result.path == tmp_path / "out" / "30" and "basegraph.meta does, " in result.proof
    answers = served(result.path, rows=X)
    np.testing.assert_allclose(answers["scores"], logits, **ROUNDING)
    assert answers["label"].tolist() == label.tolist()
    assert not export.scan_saved_model(result.path).problems


def test_training_graph_is_pruned_to_the_outputs(tmp_path):
    logits, _ = train(tmp_path, base=False)
    command = [COMMAND, "export", tmp_path / "model-30", tmp_path / "out", "--outputs", "scores=net/logits:0"]
    shown = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "step 30" in shown.stdout and "as the graph of model-30.meta does" in shown.stdout
    np.testing.assert_allclose(served(tmp_path / "out" / "1", x=X)["scores"], logits, **ROUNDING)
    ops = export.scan_saved_model(tmp_path / "out" / "1").ops
    assert "PyFunc" not in ops and "ResourceApplyAdam" not in ops


def test_unambiguous_names_are_found(tmp_path):
    _, label = train(tmp_path, base=True)
    result = export.export_graph(tmp_path, tmp_path / "out")  # the latest checkpoint
    assert served(result.path, x=X)["label"].tolist() == label.tolist()
    (tmp_path / "model_basegraph.meta").unlink()
    with pytest.raises(ExportError, match="Name it: --outputs"):
        export.export_graph(tmp_path, tmp_path / "out")


def test_unservable_graphs_are_refused_and_nothing_is_published(tmp_path):
    train(tmp_path, base=False)
    for arguments, said in (
        ({"outputs": {"y": "nothing:0"}}, "nothing:0.*not in the pruned graph"),
        ({"outputs": {"y": "PyFunc:0"}}, "Python callback"),
        ({"outputs": {"y": "net/logits:0"}, "inputs": {"x": "label:0"}}, "outputs must depend on the inputs"),
        ({"outputs": {"y": "net/logits:0"}, "meta_graph": tmp_path / "model-30.index"}, "export_meta_graph wrote"),
    ):
        with pytest.raises(ExportError, match=said):
            export.export_graph(tmp_path / "model-30", tmp_path / "out", **arguments)
    with pytest.raises(ExportError, match="without a checkpoint"):
        export.export_graph(tmp_path / "model-31", tmp_path / "out")
    train(tmp_path, base=True, nan=True)
    with pytest.raises(ExportError, match="NaN or Inf in 'net/w'"):
        export.export_graph(tmp_path / "model-30", tmp_path / "out", outputs={"y": "net/logits:0"})
    assert [entry for entry in (tmp_path / "out").iterdir() if not entry.name.startswith(".")] == []
