"""Exports that must be refused, with their messages; nothing is published then."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from export_zoo import Blocks, rows
from keras import layers

from keras_ddl import export, model_state
from keras_ddl.checkpoint import tensor_bundle
from keras_ddl.errors import CheckpointError, ConfigError, ExportError
from keras_ddl.export import manifest, versions
from keras_ddl.export.sources import weights
from keras_ddl.files import digests
from keras_ddl.serving import model_config


def small_model() -> Any:
    stack = [keras.Input((4,), name="x"), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1, name="y")]
    return keras.Sequential(stack)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    model = small_model()
    base = export.write_base_graph(model, root, sample=rows(4))
    model_state.save_checkpoint(model, root, 1, 1, {"loss": 0.5}, base=base)
    model_state.save_checkpoint(model, root, 2, 2, {"loss": 0.4}, base=base)
    model.variables[0].assign(np.full((4, 3), np.nan))
    model_state.save_checkpoint(model, root, 3, 3, {"loss": float("nan")}, base=base)
    return root


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "ckpt"))


def export_here(ckpt: Path, out: Path, **options: Any) -> Any:
    return export.export_saved_model(ckpt, out, validate="here", **{"which": 2, **options})


def contents(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir()) if path.exists() else []


def test_version_is_never_overwritten(trained: Path, tmp_path: Path) -> None:
    export_here(trained, tmp_path / "out", version=4)
    before = (tmp_path / "out" / "4" / "saved_model.pb").stat().st_mtime_ns
    with pytest.raises(ExportError, match="never overwritten.*out/4, which already exists.*--version"):
        export_here(trained, tmp_path / "out", version=4)
    (tmp_path / "out" / "9").mkdir()  # empty, so a plain rename() would replace it
    with pytest.raises(ExportError, match="out/9, which already exists"):
        export_here(trained, tmp_path / "out", version="9")
    assert (tmp_path / "out" / "4" / "saved_model.pb").stat().st_mtime_ns == before
    assert export_here(trained, tmp_path / "out").version == 10
    assert contents(tmp_path / "out") == ["10", "4", "9"]


def test_keep_keeps_the_highest_versions_and_the_new_one(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for version in (2, 3, 10):
        export_here(trained, out, version=version)
    (out / "notes").mkdir()
    assert export_here(trained, out, keep=2).removed == (3, 2)
    assert contents(out) == ["10", "11", "notes"]
    # A version that the user numbered lower is not removed right after it is published.
    assert export_here(trained, out, version=5, keep=1).removed == (10,)
    assert contents(out) == ["11", "5", "notes"]
    (out / "1").symlink_to("1")  # cannot be opened, and so cannot be locked
    with pytest.warns(UserWarning, match=r"Removing an old version at .*out/1 failed: Too many levels"):
        assert export_here(trained, out, keep=1).removed == (11, 5)  # published anyway
    assert contents(out) == ["1", "12", "notes"]
    for keep in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="1 or more.*Received"):
            export_here(trained, out, keep=keep)


@pytest.mark.parametrize("version", ["v2", "-1", "1.5", "²"])
def test_version_must_be_a_number(trained: Path, tmp_path: Path, version: str) -> None:
    with pytest.raises(ExportError, match="whole number, 0 or more.*TensorFlow Serving.*Received"):
        export_here(trained, tmp_path / "out", version=version)
    assert contents(tmp_path / "out") == []


def test_versions_are_the_ones_that_a_server_finds(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "٣٣").mkdir(parents=True)  # digits, but no version to TensorFlow Serving
    (out / str(2**63)).mkdir()  # beyond an int64
    (out / "9").symlink_to("9")
    assert export_here(trained, out).version == 10
    assert versions.choose(out, 2**63 - 1, None).name == str(2**63 - 1)
    (out / str(2**63 - 1)).mkdir()
    with pytest.raises(ExportError, match=f"the highest in the directory plus one. Received: .*{2**63 - 1}.*--version"):
        export_here(trained, out)
    assert sorted(model_config.versions_on_disk(out)[0]) == [10]
    shutil.copytree(out / "10", out / ("0" * 30 + "12"))
    (out / str(2**63 - 1)).rmdir()
    shutil.copytree(out / "10", out / str(2**63 - 1))
    assert sorted(model_config.versions_on_disk(out)[0]) == [10, 12, 2**63 - 1]


def put_special_file(path: Path, kind: str, private: Path) -> None:
    """Puts something other than a regular file at `path`."""
    if kind == "link":
        path.symlink_to(private)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["link", "FIFO", "socket", "device"])
@pytest.mark.parametrize("where", ["base/assets/extra.txt", "base/saved_model.pb", "base/variables/static.index"])
def test_special_files_are_refused_unread(copy: Path, tmp_path: Path, where: str, kind: str) -> None:
    private = tmp_path / "private"
    private.write_text("secret")
    target = copy / where
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    put_special_file(target, kind, private)
    words = {"device": "a symbolic link", "link": "a symbolic link"}.get(kind, f"a {kind}")
    with pytest.raises(ExportError, match=f"{where.removeprefix('base/')} is {words}"):
        export_here(copy, tmp_path / "out")
    assert contents(tmp_path / "out") == []


@pytest.mark.parametrize("where", ["base", "ckpt-00000002", "ckpt-00000002/state.json"])
def test_links_to_private_files_are_refused(copy: Path, tmp_path: Path, where: str) -> None:
    (copy / where).rename(tmp_path / "private")
    (copy / where).symlink_to(tmp_path / "private")
    with pytest.raises((ExportError, CheckpointError), match="is a symbolic link"):
        export_here(copy, tmp_path / "out")


def test_files_that_the_manifest_does_not_list_are_not_exported(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    (copy / "base" / "assets").mkdir(exist_ok=True)
    (copy / "base" / "assets" / "hard").hardlink_to(tmp_path / "private")
    result = export_here(copy, tmp_path / "out")
    assert contents(result.path / "assets") == []


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({}, "format None"),
        ({"format": 1}, "lacks files"),
        ({"format": 1, "files": []}, "list of files is damaged"),
        ({"format": 1, "files": {"saved_model.pb": 3}}, "list of files is damaged"),
    ],
)
def test_invalid_manifests_are_refused(copy: Path, tmp_path: Path, record: Any, words: str) -> None:
    (copy / "base" / "manifest.json").write_text(json.dumps(digests.sealed(record)))
    with pytest.raises(ExportError, match=f"The base graph must be intact.*{words}"):
        export_here(copy, tmp_path / "out")


@pytest.mark.parametrize("where", ["base/manifest.json", "ckpt-00000002/state.json"])
def test_deeply_nested_json_is_refused(copy: Path, tmp_path: Path, where: str) -> None:
    for text in ("[" * 100_000, "[" * 300 + "]" * 300):
        (copy / where).write_text(text)
        with pytest.raises((ExportError, CheckpointError), match="more than 200 levels"):
            export_here(copy, tmp_path / "out")


def test_concurrent_exports_get_different_versions(tmp_path: Path) -> None:

    chosen = threading.Barrier(6)

    def export(number: int) -> str:
        final = versions.choose(tmp_path / "out", None, None)
        staged = tmp_path / f"staged-{number}"
        staged.mkdir()
        (staged / "saved_model.pb").write_text(str(number))
        chosen.wait()  # all have chosen 1
        return versions.publish(staged, final, None, automatic=True)[0].name

    with ThreadPoolExecutor(6) as threads:
        assert sorted(threads.map(export, range(6))) == contents(tmp_path / "out") == list("123456")
    assert sorted(path.read_text() for path in (tmp_path / "out").glob("*/*")) == list("012345")


def test_chosen_version_is_never_replaced_by_another(tmp_path: Path) -> None:

    final = versions.choose(tmp_path / "out", 7, None)
    (final / "saved_model.pb").mkdir(parents=True)  # another export is faster
    (tmp_path / "staged").mkdir()
    with pytest.raises(ExportError, match="never overwritten"):
        versions.publish(tmp_path / "staged", final, None, automatic=False)


def test_output_must_be_a_writable_directory(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExportError, match="needs a directory.*a file is in the way"):
            export_here(trained, out)
    assert (tmp_path / "file").read_text() == "kept"


def test_output_of_another_user_is_refused(trained: Path, foreign_directory: Path) -> None:

    with pytest.raises(ExportError, match="may write to.*locked.*owner or mode"):
        versions.choose(foreign_directory, None, 2)


def test_missing_checkpoint_and_missing_base_graph_differ_in_message(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must exist.*nothing there"):
        export_here(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="with no checkpoint .holds: nothing"):
        export_here(tmp_path / "empty", tmp_path / "out", which="latest")
    shutil.rmtree(copy / "base")
    with pytest.raises(ExportError, match=r"needs the base graph.*without base/.*export_base=True"):
        export_here(copy, tmp_path / "out")
    assert contents(tmp_path / "out") == []


def test_wrong_choices_list_the_valid_ones(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'latest', 'best' or a step. Received: 'last'.*1, 2, 3"):
        export_here(trained, tmp_path / "out", which="last")
    with pytest.raises(CheckpointError, match=r"metric='val_auc'.*\['loss'\]"):
        export_here(trained, tmp_path / "out", which="best", metric="val_auc")
    with pytest.raises(ConfigError, match="'process', 'here' or 'off'"):
        export.export_saved_model(trained, tmp_path / "out", validate="maybe")
    with pytest.raises(ExportError, match="base graphs of one model, and --model .* 'head'. Leave --model out"):
        export_here(trained, tmp_path / "out", model="head")
    assert export_here(trained, tmp_path / "out", which="best", metric="loss").step == 2


def test_nan_weights_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"NaN or Inf in .*\(step 3\).*dense.*kernel \(12 of 12\)"):
        export_here(trained, tmp_path / "out", which="latest")
    assert contents(tmp_path / "out") == []


def test_not_finite_counts_only_nan_and_inf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SLICE", 2)  # large weights are checked in slices
    largest = [3.4e38, 3.4e38]  # their sum is not finite
    values = {
        "fine": [tf.constant(largest), tf.constant([], tf.float32), tf.constant([65504, 65504], tf.float16)],
        "bad": [
            tf.constant([np.inf, *largest, -np.inf]),
            tf.constant([np.inf, -np.inf, 0]),  # their sum is NaN
            tf.constant(np.nan, tf.float64),
            tf.constant([1, np.inf], tf.bfloat16),
            tf.cast([1, np.nan], tf.dtypes.experimental.float8_e5m2),
            tf.constant([complex(0, np.nan), 1]),
        ],
    }
    held = {
        tensor_bundle.variable_key("w", f"{kind}{i}"): each
        for kind, group in values.items()
        for i, each in enumerate(group)
    }
    counts = ["2 of 4", "2 of 3", "1 of 1", "1 of 2", "1 of 2", "1 of 2"]
    assert weights._not_finite(held) == [f"bad{i} ({count})" for i, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights.data-00000-of-00001", r"weights\.data-00000-of-00001 has \d+ of \d+ bytes"),
        ("weights.index", r"weights\.index has"),
        ("golden.npz", r"golden\.npz has"),
    ],
)
def test_truncated_checkpoint_is_refused(copy: Path, tmp_path: Path, name: str, words: str) -> None:
    file = copy / "ckpt-00000002" / name
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"complete to be read.*{words}.*earlier step"):
        export_here(copy, tmp_path / "out")


def test_checkpoint_of_another_model_is_refused(copy: Path, tmp_path: Path) -> None:
    other = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(2, name="y")]
    )
    model_state.save_checkpoint(other, tmp_path / "other", 7)
    shutil.copytree(tmp_path / "other" / "ckpt-00000007", copy / "ckpt-00000007")
    with pytest.raises(
        CheckpointError, match=r"of another model: .*y/kernel is float32\[3, 2\] there, .*\[3, 1\] here"
    ):
        export_here(copy, tmp_path / "out", which=7)
    assert contents(tmp_path / "out") == []


@pytest.mark.parametrize("room", ["for nothing", "for the graph", "for all but the end"])
def test_full_disk_leaves_nothing_behind(tmp_path: Path, room: str) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2000), layers.Dense(100)])  # 0.8 MB
    base = export.write_base_graph(model, tmp_path / "ckpt")
    saved = model_state.save_checkpoint(model, tmp_path / "ckpt", 1, base=base)
    graph = (tmp_path / "ckpt" / "base" / "saved_model.pb").stat().st_size
    weights = Path(saved.weights + ".data-00000-of-00001").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = {"for nothing": 10, "for the graph": graph + 10, "for all but the end": weights - 1000}[room]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))  # Python ignores the signal: writes fail
    try:
        with pytest.raises(ExportError, match="must be written completely. Received: no space left.*keep fewer"):
            export_here(tmp_path / "ckpt", tmp_path / "out", which=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "out") == []
    assert export_here(tmp_path / "ckpt", tmp_path / "out", which=1).version == 1


def test_altered_files_are_refused(copy: Path, tmp_path: Path) -> None:
    def alter(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)

    alter(copy / "ckpt-00000002" / "weights.data-00000-of-00001")
    with pytest.raises(CheckpointError, match="was altered after it was written"):
        export_here(copy, tmp_path / "out")
    alter(copy / "base" / "saved_model.pb")
    with pytest.raises(ExportError, match=r"base graph must be intact.*saved_model\.pb was altered"):
        export_here(copy, tmp_path / "out", which=1)
    (copy / "base" / "manifest.json").unlink()
    with pytest.raises(ExportError, match=r"manifest\.json is missing"):
        export_here(copy, tmp_path / "out", which=1)


def rewrite_base(ckpt: Path, change: Callable[[Any], None]) -> None:
    """Changes the graph and seals the base again, as if another program had written it."""
    from tensorflow.core.protobuf import saved_model_pb2

    base = ckpt / "base"
    saved = saved_model_pb2.SavedModel.FromString((base / "saved_model.pb").read_bytes())
    change(saved.meta_graphs[0].graph_def)
    (base / "saved_model.pb").write_bytes(saved.SerializeToString())
    record = json.loads((base / "manifest.json").read_text())
    (base / "manifest.json").unlink()
    manifest.write(base, {key: value for key, value in record.items() if key not in ("sha256", "files", "format")})


@pytest.mark.parametrize(
    ("op", "device", "words"),
    [
        ("DdlAllReduceN", "", r"communication op DdlAllReduceN \(node 'leaked' in function '__inference"),
        ("CollectiveReduceV2", "", "communication op CollectiveReduceV2"),
        ("NcclAllReduce", "", "communication op NcclAllReduce"),
        ("EagerPyFunc", "", "Python callback EagerPyFunc"),
        ("MyOwnOp", "", "custom op MyOwnOp"),
        ("Relu", "/device:GPU:0", "device /device:GPU:0 requested by Relu"),
        ("Relu", "/job:worker/task:1/device:CPU:0", "device /job:worker/task:1/device:CPU:0"),
    ],
)
def test_graph_that_no_server_runs_is_refused(copy: Path, tmp_path: Path, op: str, device: str, words: str) -> None:
    def leak(graph: Any) -> None:
        graph.library.function[0].node_def.add(name="leaked", op=op, device=device)

    rewrite_base(copy, leak)
    with pytest.raises(ExportError, match=f"only TensorFlow's own ops(.|\n)*{words}"):
        export_here(copy, tmp_path / "out")
    assert contents(tmp_path / "out") == []


def test_cudnn_op_is_a_warning(copy: Path) -> None:
    rewrite_base(copy, lambda graph: graph.node.add(name="gpu_only", op="CudnnRNNV3"))
    report = export.scan_saved_model(copy / "base")
    assert report.problems == () and "CudnnRNNV3 runs only on a GPU (node 'gpu_only'" in report.warnings[0]


def test_outputs_that_differ_are_refused(copy: Path, tmp_path: Path) -> None:
    def deviate(graph: Any) -> None:
        for function in graph.library.function:
            for node in function.node_def:
                if node.op == "Rsqrt":
                    node.op = "Sqrt"

    rewrite_base(copy, deviate)
    with pytest.raises(ExportError, match="trained model's outputs for the stored sample. Received: y differs by"):
        export_here(copy, tmp_path / "out")
    assert contents(tmp_path / "out") == []


def test_constant_that_training_changed_is_refused(tmp_path: Path) -> None:
    class Tempered(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = layers.Dense(2)
            self.temperature = 1.0

        def call(self, x: Any) -> Any:
            return self.head(x) * self.temperature

    model = Tempered()
    model(rows(3))
    base = export.write_base_graph(model, tmp_path, sample=rows(3))
    model.temperature = 0.5
    model_state.save_checkpoint(model, tmp_path, 1, base=base)
    with pytest.raises(ExportError, match="must give the model's outputs.*output_0 differs by.*before fit"):
        export_here(tmp_path, tmp_path / "out", which=1)


def test_late_adapt_is_refused(tmp_path: Path) -> None:
    scaled = layers.Normalization()
    scaled.adapt(rows(4))
    model = keras.Sequential([keras.Input((4,)), scaled, layers.Dense(1)])
    export.write_base_graph(model, tmp_path)
    model_state.save_checkpoint(model, tmp_path, 1)
    assert export_here(tmp_path, tmp_path / "out", which=1).proof.endswith("no outputs of training to compare with")
    scaled.adapt(rows(4) * 9)
    model_state.save_checkpoint(model, tmp_path, 2)
    with pytest.raises(ExportError, match=r"Constants of the base graph.*normalization.*/mean.*adapt\(\) before"):
        export_here(tmp_path, tmp_path / "out", which=2)


class Calls(layers.Layer):
    """Calls a function at inference that a server cannot run."""

    def __init__(self, what: Callable[[Any], Any]) -> None:
        super().__init__()
        self.what = what

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(self.what(x), x.shape)


def test_python_callback_is_refused_at_train_begin(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), Calls(lambda x: tf.numpy_function(np.abs, [x], tf.float32))])
    with pytest.raises(ExportError, match=r"own ops(.|\n)*Python callback PyFunc \(node '.*' in function"):
        export.write_base_graph(model, tmp_path)
    assert contents(tmp_path) == []


def test_failing_call_is_refused_at_train_begin(tmp_path: Path) -> None:
    class Broken(keras.Model):
        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                raise RuntimeError("no inference here")
            return x

    with pytest.raises(
        ExportError, match="tracing it failed with RuntimeError(.|\n)*no inference here(.|\n)*export_base=False"
    ):
        export.write_base_graph(Broken(), tmp_path, input_signature=tf.TensorSpec([None, 4]))


def test_inputs_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="not built yet.*Input"):
        export.write_base_graph(keras.Sequential([layers.Dense(1)]), tmp_path)
    model = Blocks()
    model.build((None, 5))
    with pytest.raises(ExportError, match=r"needs the dtypes.*subclassed.*sample= or input_signature="):
        export.write_base_graph(model, tmp_path)
    pair = [keras.Input((4,)), keras.Input((4,))]
    two = keras.Model(pair, layers.add(pair))
    with pytest.raises(ExportError, match="structure that the model takes. Received: list"):
        export.write_base_graph(two, tmp_path, sample=[rows(4)])
    with pytest.raises(ExportError, match="structure that the model takes. Received: dict"):
        export.write_base_graph(small_model(), tmp_path, sample={"other": rows(4)})
    with pytest.raises(ExportError, match=r"sample rows must have the shape.*\(None, 4\). Received: \(5, 7\)"):
        export.write_base_graph(small_model(), tmp_path, sample=rows(7))
    wide = keras.Input((4,), sparse=True, name="wide")
    with pytest.raises(ExportError, match=r"must fit input 'wide', SparseTensorSpec.*of shape \(5, 7\)"):
        export.write_base_graph(keras.Model(wide, layers.Dense(1)(wide)), tmp_path, sample=rows(7))
    assert contents(tmp_path) == []


def test_directory_without_saved_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"must hold saved_model\.pb"):
        export.scan_saved_model(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ExportError, match=r"must hold saved_model\.pb"):
        export.scan_saved_model(tmp_path)
