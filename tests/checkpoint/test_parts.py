"""Bundles that several write, each its boxes of tensors: TensorFlow reads complete tensors, others what they need."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_ddl import checkpoint
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.bundle_index import stored_boxes
from keras_ddl.checkpoint.snapshot import Buffers, Snapshot, merge_bundles, sync_bundles
from keras_ddl.cut import Slices
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.errors import CheckpointError
from keras_ddl.state.boxes import without_all

TABLES = {
    "matrix": (np.arange(48.0).reshape(8, 6), Slices((8, 6), 2, 1), Slices((8, 6), 4, 0)),
    "vector": (np.arange(12, dtype=np.float32), Slices((12,), 4, 0), Slices((12,), 3, 0)),
    "kernel": (np.arange(24, dtype=np.int64).reshape(2, 6, 2), Slices((2, 6, 2), 3, 1), Slices((2, 6, 2), 2, 2)),
    "flat": (np.arange(30.0).reshape(2, 5, 3), Layout((2, 5, 3), 4), Layout((2, 5, 3), 3)),
    "few": (np.arange(4.0).reshape(1, 4), Layout((1, 4), 3), Layout((1, 4), 5)),
    "less": (np.arange(2.0), Layout((2,), 3), Layout((2,), 2)),
    "both": (np.arange(12.0).reshape(4, 3), Layout((4, 3), 3), Slices((4, 3), 3, 1)),
}


def write(folder: Path, prefix: str = "weights", suffix: str = "", more: dict[str, object] | None = None) -> str:
    """Writes all tables as if each rank had what the first layout says. Returns the prefix of the merged bundle."""
    written = {}
    for rank in range(4):
        parts = {
            f"{key}{suffix}": bundle.Part(array.shape, layout.boxes(rank), tf.constant(layout.cut(array, rank)))
            for key, (array, layout, _) in TABLES.items()
            if rank < layout.size and layout.boxes(rank)
        }
        alone = {"alone": tf.constant("as it is"), **(more or {})} if rank == 0 else {}
        snapshot = Snapshot({prefix: alone}, {prefix: parts})
        snapshot.copy_into(Buffers())
        written[rank] = snapshot.write_bundles(folder, rank)
        sync_bundles(folder, written[rank], rank)
    merge_bundles(folder, written)
    return str(folder / prefix)


def test_a_bundle_of_parts_is_read_as_one_of_complete_tensors(tmp_path: Path) -> None:
    reader = tf.train.load_checkpoint(write(tmp_path))
    assert set(reader.get_variable_to_shape_map()) == {*TABLES, "alone"}
    for key, (array, _, _) in TABLES.items():
        assert reader.get_tensor(key).dtype == array.dtype
        np.testing.assert_array_equal(reader.get_tensor(key), array)
    assert reader.get_tensor("alone") == b"as it is"
    assert bundle.entries(str(tmp_path / "weights"))["matrix"] == ("float64", (8, 6))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*(f"weights.data-0000{i}-of-00004" for i in range(4)), "weights.index"]


def test_complete_tensors_and_parts_are_read_in_other_parts(tmp_path: Path) -> None:
    bundle.write(complete := str(tmp_path / "complete"), {key: array for key, (array, _, _) in TABLES.items()})
    for prefix in (write(tmp_path), complete):
        for key, (array, _, other) in TABLES.items():
            for rank in range(other.size):
                read = bundle.read_boxes(prefix, key, array.dtype.name, array.shape, other.boxes(rank))
                np.testing.assert_array_equal(read, np.reshape(other.cut(array, rank), -1))


def test_the_index_of_a_bundle_tells_which_boxes_are_stored(tmp_path: Path) -> None:
    stored = stored_boxes(write(tmp_path))
    assert stored.keys() == {*TABLES, "alone"} and stored["alone"] == [()]
    for key, (array, layout, _) in TABLES.items():
        parts = [box for rank in range(layout.size) for box in layout.boxes(rank)]
        whole = [tuple((0, extent) for extent in array.shape)]
        assert set(stored[key]) == set(parts), key
        assert without_all(whole, stored[key]) == [] and without_all(whole, stored[key][1:]) != []
    many = {f"variable/{number}": tf.zeros([number % 5]) for number in range(6000)}  # several blocks
    bundle.write(str(tmp_path / "many"), many)
    assert stored_boxes(str(tmp_path / "many")) == {key: [((0, each.shape[0]),)] for key, each in many.items()}


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[20:]])
def test_what_is_no_index_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    index = Path(f"{write(tmp_path)}.index")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(OSError, match="no"):
        stored_boxes(str(tmp_path / "weights"))


@pytest.mark.parametrize("writers", [range(4), [0, 1, 3], [1, 2, 3]])
def test_a_checkpoint_without_some_parts_does_not_validate(writers: Sequence[int], tmp_path: Path) -> None:
    array, layout = np.arange(48.0).reshape(8, 6), Slices((8, 6), 4, 0)

    def fill(folder: Path) -> dict[str, Any]:
        written = {}
        for rank in writers:
            part = bundle.Part(array.shape, layout.boxes(rank), tf.constant(layout.cut(array, rank)))
            other = {} if rank else {"weights/whole": tf.zeros([3])}
            written[rank] = Snapshot({"weights": other}, {"weights": {"weights/matrix": part}}).write_bundles(
                folder, rank
            )
        merge_bundles(folder, written)
        return {"weights": [["weights/matrix", "float64", [8, 6]], ["weights/whole", "float32", [3]]]}

    written = checkpoint.write(tmp_path, 1, fill)
    if len(writers) == 4:
        checkpoint.validate(written)
        return
    first = 4 if 0 in writers else 0
    lacking = rf"matrix \[8, 6\] lacks the entries \(\({first}, 2\), \(0, 6\)\)"
    with pytest.raises(CheckpointError, match=f"must be complete.*ckpt-00000001: {lacking}"):
        checkpoint.validate(written)


def test_a_bundle_of_parts_is_restored_by_tensorflows_checkpoint(tmp_path: Path) -> None:
    """The graph of objects is one more entry of the bundle, which says which variable has which key."""
    tracked = {key: tf.Variable(array) for key, (array, _, _) in TABLES.items()}
    own = tf.train.load_checkpoint(tf.train.Checkpoint(**tracked).write(str(tmp_path / "own")))
    graph = "_CHECKPOINTABLE_OBJECT_GRAPH"
    prefix = write(tmp_path, "parts", bundle.SUFFIX, {graph: tf.constant(own.get_tensor(graph))})
    for each in tracked.values():
        each.assign(tf.zeros_like(each))
    tf.train.Checkpoint(**tracked).read(prefix).assert_consumed()
    for key, (array, _, _) in TABLES.items():
        np.testing.assert_array_equal(tracked[key], array)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (3, 1, 2, 2), (1, 6), (0, 4)])
def test_the_boxes_of_chunks_are_all_entries_in_their_order(shape: tuple[int, ...]) -> None:
    entries = np.arange(math.prod(shape)).reshape(shape)
    for size in range(1, 9):
        layout = Layout(shape, size)
        for rank in range(size):
            boxes = layout.boxes(rank)
            assert len(boxes) < 2 * len(shape)
            box_tensors = [entries[tuple(slice(b, b + n) for b, n in box)].reshape(-1) for box in boxes]
            np.testing.assert_array_equal([*itertools.chain(*box_tensors)], layout.cut(entries, rank))


def test_dtypes_that_are_written_in_parts_can_be_read(tmp_path: Path) -> None:
    for name in sorted(bundle.DTYPES_IN_PARTS):
        array = tf.cast(tf.reshape(tf.range(6), [2, 3]), name)
        parts = [bundle.Part((2, 3), [((row, 1), (0, 3))], array[row : row + 1]) for row in range(2)]
        prefixes = [str(tmp_path / f"{name}-{row}") for row in range(2)]
        for prefix, part in zip(prefixes, parts):
            bundle.write(prefix, {}, {"table": part})
        bundle.merge(prefixes, str(tmp_path / name))
        assert tf.reduce_all(bundle.read(str(tmp_path / name), {"table": name})["table"] == array)
