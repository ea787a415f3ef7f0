"""A TensorFlow 1 script with separate graphs and Savers for training, evaluation and inference."""

import shutil
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
WORDS = ["<unk>", "<s>", "</s>", "a", "cat", "dog", "runs", "sits"]
STEPS = 4  # decoder steps
SOURCE = np.array([[b"a", b"cat", b"runs"], [b"the", b"dog", b"sits"]])


class Seq2Seq:
    """One of the graphs: looks up, embeds and sums words, and decodes one word at a time in a loop."""

    def __init__(self, mode: str, vocabulary: Path, parts: int | None = None) -> None:
        self.mode = mode
        self.graph = tf.Graph()
        with self.graph.as_default():
            v1.set_random_seed(3)
            file = str(vocabulary)
            index = tf.lookup.TextFileIndex
            ids = tf.lookup.StaticHashTable(
                tf.lookup.TextFileInitializer(file, tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER), 0
            )
            words = tf.lookup.StaticHashTable(
                tf.lookup.TextFileInitializer(file, tf.int64, index.LINE_NUMBER, tf.string, index.WHOLE_LINE), "?"
            )
            self.source = v1.placeholder(tf.string, [None, None], name="source")
            partitioner = v1.fixed_size_partitioner(parts) if parts else None
            with v1.variable_scope("nmt", partitioner=partitioner):
                self.embedding = v1.get_variable("embedding", [len(WORDS), 6])
            with v1.variable_scope("nmt"):
                self.step = v1.get_variable("step", [6, 6])
                self.out = v1.get_variable("out", [6, len(WORDS)])
            state = tf.reduce_sum(self.embed(ids.lookup(self.source)), axis=1)
            if mode == "infer":
                self.answer = tf.identity(words.lookup(self.decode(state)), "words")
            else:
                self.teach(state)
            self.saver = v1.train.Saver()

    def embed(self, ids):
        return v1.nn.embedding_lookup(self.embedding, ids, partition_strategy="div")

    def next(self, state, ids):
        state = tf.tanh(state @ self.step + self.embed(ids))
        return state, state @ self.out

    def decode(self, state):
        def body(number, state, last, said):
            state, logits = self.next(state, last)
            last = tf.argmax(logits, axis=1)
            return number + 1, state, last, tf.concat([said, last[:, None]], axis=1)

        first = tf.fill([tf.shape(state)[0]], tf.constant(1, tf.int64))
        none = tf.zeros([tf.shape(state)[0], 0], tf.int64)
        shapes = [tf.TensorShape([]), state.shape, first.shape, tf.TensorShape([None, None])]
        loop = v1.while_loop(lambda number, *_: number < STEPS, body, [0, state, first, none], shapes)
        return loop[3]

    def teach(self, state):
        self.target = v1.placeholder(tf.int64, [None, STEPS], name="target")
        loss = 0.0
        last = tf.fill([tf.shape(state)[0]], tf.constant(1, tf.int64))
        for number in range(STEPS):
            state, logits = self.next(state, last)
            last = self.target[:, number]
            loss += tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=last, logits=logits))
        self.loss = tf.identity(loss, "loss")
        if self.mode == "train":
            # Stands for communication in training: an operation that no server has.
            seen = v1.py_func(lambda value: value, [loss], tf.float32)
            seen.set_shape([])
            self.averages = tf.train.ExponentialMovingAverage(0.5)
            step = v1.train.AdamOptimizer(0.05).minimize(seen * 0 + loss, v1.train.get_or_create_global_step())
            with tf.control_dependencies([step]):
                self.train = self.averages.apply(v1.trainable_variables())


@pytest.fixture(params=["functions", pytest.param("loops of TensorFlow 1", marks=pytest.mark.long)])
def loops(request):
    """Loops in graphs have two forms; a script that disables TensorFlow 2 behavior creates the older one."""
    if request.param == "functions":
        yield
        return
    v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_script(folder)
    return folder


def run_script(folder: Path, parts: int | None = None) -> dict[str, Seq2Seq]:
    """Trains and evaluates; saves checkpoints of the training graph and base graphs of the other two."""
    vocabulary = folder / "vocabulary.txt"
    vocabulary.write_text("\n".join(WORDS))
    graphs = {mode: Seq2Seq(mode, vocabulary, parts) for mode in ("train", "eval", "infer")}
    for mode in ("eval", "infer"):
        with graphs[mode].graph.as_default():
            v1.train.export_meta_graph(str(folder / f"{mode}_basegraph.meta"))
    one = graphs["train"]
    target = np.array([[3, 4, 6, 2], [3, 5, 7, 2]])
    with v1.Session(graph=one.graph) as session, one.graph.as_default():
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        for _ in range(40):
            session.run(one.train, {one.source: SOURCE, one.target: target})
        one.saver.save(session, str(folder / "nmt"), global_step=40)
    return graphs


def infer(one: Seq2Seq, checkpoint: Path, saver=None):
    """Returns the script's own outputs, from its inference graph restored by its own Saver."""
    with v1.Session(graph=one.graph) as session, one.graph.as_default():
        (saver or one.saver).restore(session, str(checkpoint))
        session.run(v1.tables_initializer())
        return session.run(one.answer, {one.source: SOURCE}).tolist()


def served(path: Path):
    loaded = tf.saved_model.load(str(path))  # kept, because signatures do not keep the variables alive
    return loaded.signatures["serving_default"](source=tf.constant(SOURCE))["words"].numpy().tolist()


def test_named_graph_is_served(tmp_path, loops):
    graphs = run_script(tmp_path)
    expected = infer(graphs["infer"], tmp_path / "nmt-40")
    assert expected == [[b"a", b"cat", b"runs", b"</s>"], [b"a", b"dog", b"sits", b"</s>"]]  # the trained sentences
    with pytest.raises(ExportError, match=r"needs exactly one graph.*eval_basegraph.meta, infer_basegraph.meta"):
        export.export_graph(tmp_path, tmp_path / "out")
    with pytest.raises(ExportError, match="Received: test; beside.*Choose with --meta-graph.*eval or infer"):
        export.export_graph(tmp_path, tmp_path / "out", meta_graph="test")
    command = [COMMAND, "export", tmp_path, tmp_path / "out", "--meta-graph", "infer"]
    shown = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "as the graph of infer_basegraph.meta does, bit for bit" in shown.stdout
    (tmp_path / "vocabulary.txt").unlink()  # the export has a copy
    assert served(tmp_path / "out" / "1") == expected
    with pytest.raises(
        ExportError, match=r"a graph's tables read.*infer_basegraph.meta, which reads \[.*vocabulary.txt"
    ):
        export.export_graph(tmp_path, tmp_path / "out", meta_graph="infer")


def test_graph_may_be_added_later_in_another_directory(trained, tmp_path):
    for file in trained.glob("nmt-40.[di]*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ExportError, match="must have a graph beside it.*nmt-40.meta in"):
        export.export_graph(tmp_path / "nmt-40", tmp_path / "out")
    later = Seq2Seq("infer", trained / "vocabulary.txt")
    (tmp_path / "other").mkdir()
    with later.graph.as_default():
        v1.train.export_meta_graph(str(tmp_path / "other" / "graph.meta"))
    path = export.export_graph(tmp_path / "nmt-40", tmp_path, meta_graph=tmp_path / "other" / "graph.meta").path
    assert served(path) == infer(later, trained / "nmt-40")


def test_averaged_weights_come_from_the_graphs_own_saver(trained, tmp_path):
    later = Seq2Seq("infer", trained / "vocabulary.txt")
    with later.graph.as_default():
        averaged = v1.train.Saver(tf.train.ExponentialMovingAverage(0.5).variables_to_restore())
        averaged.export_meta_graph(str(tmp_path / "averaged_basegraph.meta"))
    path = export.export_graph(trained, tmp_path / "out", meta_graph=tmp_path / "averaged_basegraph.meta").path
    assert served(path) == infer(later, trained / "nmt-40", averaged)
    reader = tf.train.load_checkpoint(str(trained / "nmt-40"))
    kept = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    np.testing.assert_array_equal(kept.get_tensor("nmt/out"), reader.get_tensor("nmt/out/ExponentialMovingAverage"))


def test_variables_missing_in_the_checkpoint_are_listed(trained, tmp_path):
    later = Seq2Seq("infer", trained / "vocabulary.txt")
    with later.graph.as_default():
        scale = v1.get_variable("nmt/scale", [])
        other = v1.get_variable("nmt/other", [3])
        tf.strings.join([later.answer, tf.strings.as_string(scale + tf.reduce_sum(other))], name="scaled")
        v1.train.export_meta_graph(str(tmp_path / "more.meta"))
    with pytest.raises(
        ExportError, match=r"nmt-40, without nmt/scale, nmt/other\. Check that the checkpoint belongs to this graph"
    ):
        export.export_graph(trained, tmp_path / "out", meta_graph=tmp_path / "more.meta")
    small = tf.Graph()
    with small.as_default():
        tf.identity(v1.get_variable("nmt/out", [6, 3]), "answer")
        v1.train.export_meta_graph(str(tmp_path / "small.meta"))
    with pytest.raises(ExportError, match=r"with nmt/out: float32\(6, 3\) in the graph, float32\(6, 8\) in the check"):
        export.export_graph(trained, tmp_path / "out", meta_graph=tmp_path / "small.meta", outputs={"x": "answer:0"})
    assert not list((tmp_path / "out").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("in_training", "in_inference", "has_saver"),
    [
        (3, 3, False),
        pytest.param(3, 2, True, marks=pytest.mark.long),
        pytest.param(2, None, False, marks=pytest.mark.long),
    ],
)
def test_partitioned_variables_are_joined(tmp_path, in_training, in_inference, has_saver):
    run_script(tmp_path, in_training)
    later = Seq2Seq("infer", tmp_path / "vocabulary.txt", in_inference)
    with later.graph.as_default():
        (later.saver if has_saver else v1.train).export_meta_graph(str(tmp_path / "later_basegraph.meta"))
    path = export.export_graph(tmp_path, tmp_path / "out", meta_graph="later").path
    assert served(path) == infer(later, tmp_path / "nmt-40")
    kept = [name for name, _ in tf.train.list_variables(str(path / "variables" / "variables")) if "embedding" in name]
    parts = [f"nmt/embedding/part_{number}" for number in range(in_inference or 0)]
    assert kept == (parts or ["nmt/embedding"])
