"""Checks that all ranks read the same batches, by digests of the data.

Ranks that take their rows from one batch must all have read that batch. A pipeline may break this in ways that its code
does not show: an unseeded shuffle inside a function, interleave(deterministic=False), a generator with its own random
numbers. So the ranks compare a digest of each dataset's first batches and of every k-th batch after them; for arrays, a
digest of the order of a pass.

While a batch is cut (in a thread of tf.data, perhaps ahead of time), its digest is only noted in a short list of the
process. No rank waits there, so a rank that stops reading early leaves no other rank waiting. At the start of a step
each rank sends its list and its number of rows in one collective. Notes of the same batch of the same pass over the
same dataset are compared; other notes wait for later steps. The step waits for the verdict only if its own batch has
just been noted.

A digest has a word for each of the batch's first components, so that values drawn at random in one component
(augmentation in threads) do not count as other rows: the other components then agree.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from keras_ddl import config, ops
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.keras import keras
from keras_ddl.compat.strategies import process_variable
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.data import notice, streams

FIRST = 3  # the first batches of every pass are compared, besides every KERAS_DDL_DATA_CHECK_BATCHES-th one
_NOTES = 8  # notes that are kept; several iterators may read the first batches of a pass ahead of their steps
_WORDS = 4  # in a digest: one word for each of the first components, the last word for all others
_PASSES = 256  # datasets whose passes are counted at the same time
_RULE = "All ranks must read the same batches"
PASS_OF_NEWCOMERS = 2**15  # the first pass of a joining rank, until it takes over the passes of the others
KEYS = "_keras_ddl_keys"  # marks a dataset of keys, which is not part of the program's pipeline

_components: dict[int, list[str]] = {}  # names of the components of batches in errors, by dataset


class BatchKey(NamedTuple):
    """Names a batch: the number of its dataset, of the pass over the dataset, and of the batch in the pass.

    Keys travel and are compared as one int64: 15 bits for the dataset, 16 for the pass, 32 for the batch. Its fields
    are integers or tensors.
    """

    dataset: Any
    pass_: Any
    batch: Any

    @classmethod
    def of(cls, packed: Any) -> BatchKey:
        return cls(packed // 2**48, packed // 2**32 % 2**16, packed % 2**32)

    def packed(self) -> Any:
        return (self.dataset * 2**16 + self.pass_) * 2**32 + self.batch


class _Notes:
    """The variables of the process, made by `prepare`."""

    def __init__(self) -> None:
        self.list = process_variable("order_notes", [_NOTES, 1 + _WORDS])
        self.noted, self.compared = process_variable("order_noted"), process_variable("order_compared")
        self.passes = process_variable("order_passes", [_PASSES])
        self.unlike: tuple[int, str] | None = None  # a batch with differing components, and their names
        self.has_warned = False  # of `unlike`


@functools.cache
def _notes() -> _Notes:
    return _Notes()


def prepare() -> None:
    """Makes the variables that `exchange_step_header` uses before the first step.

    If a step made them, its tf.function would be traced again and run the program's Python once more than in one
    process.
    """
    _notes()
    notice.prepare()


# ---- while a batch is read -------------------------------------------------------------------------------------------


def numbered(dataset: tf.data.Dataset, number: int) -> tf.data.Dataset:
    """Returns a dataset of (packed `BatchKey`, element)."""
    begin = pass_of(number, dataset.element_spec)

    @do_not_convert  # parsing and compiling it would take 0.1 s
    def keys_of_pass(_: tf.Tensor) -> tf.data.Dataset:
        first = begin()
        return tf.data.Dataset.range(first, first + 2**32)

    keys = tf.data.Dataset.range(1).flat_map(keys_of_pass)
    setattr(keys, KEYS, True)
    length = dataset.cardinality()
    both = tf.data.Dataset.zip((keys, dataset))
    return (
        both if length == tf.data.UNKNOWN_CARDINALITY else both.apply(tf.data.experimental.assert_cardinality(length))
    )


def pass_of(number: int, spec: Any) -> Callable[[], tf.Tensor]:
    """Returns a function for use in a dataset: it begins a pass, and returns the packed key of its first batch.

    Args:
        number: the number of the dataset.
        spec: the type spec of its batches.
    """
    _components[number] = _names(spec)
    notes = _notes()

    def begin() -> tf.Tensor:
        place = tf.constant(number % _PASSES, tf.int64)
        notes.passes.scatter_add(tf.IndexedSlices(tf.constant(1, tf.int64), place))
        return BatchKey(number, tf.gather(notes.passes, place), 0).packed()

    return begin


def passes() -> np.ndarray:
    """Returns how many passes over each dataset have begun ([numbers] int64)."""
    return np.asarray(_notes().passes.numpy())


def set_passes(counts: np.ndarray) -> None:
    """Continues from the counts that `passes` returned on another rank."""
    _notes().passes.assign(counts)


def forget_notes() -> None:
    """Forgets the notes of batches. Call it on all ranks between steps."""
    _notes().list.assign(tf.zeros_like(_notes().list))


def note(key: tf.Tensor, leaves: list[Any]) -> tf.Operation:
    """Notes the digest of a batch if the batch is one to compare. It must run before the batch is passed on."""
    index, every = BatchKey.of(key).batch, config.get("DATA_CHECK_BATCHES")
    is_looked_at = (index < FIRST) | (index % every == 0)
    return tf.cond(is_looked_at, lambda: _note(key, digest(leaves)), lambda: tf.constant(0, tf.int64))


def note_positions(key: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Like `note`, for the order of a pass: the positions of all its rows ([rows] int64)."""
    word = tf.bitwise.bitwise_or(_fingerprints(positions[tf.newaxis]), 1)  # odd: positions differ from row to row
    return _note(key, tf.concat([word, tf.zeros([_WORDS - 1], tf.int64)], 0))


def _note(key: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    notes = _notes()
    entry = tf.concat([[key], words], 0)
    place = notes.noted.read_value() % _NOTES
    with tf.control_dependencies([notes.list.scatter_update(tf.IndexedSlices(entry, place))]):
        return tf.identity(notes.noted.assign_add(1))


def digest(leaves: list[Any]) -> tf.Tensor:
    """Returns [_WORDS] int64. A word is odd if the rows of its component differ."""
    words = []
    for leaf in leaves:
        values = [_checksum(each) for each in tf.nest.flatten(leaf, expand_composites=True) if _has_digest(each)]
        if values:
            words.append(_mixed(values))
    if len(words) > _WORDS:
        words[_WORDS - 1 :] = [_mixed(words[_WORDS - 1 :])]
    component_words = [value * 2 + tf.cast(rows_differ, tf.int64) for value, rows_differ in words]
    return tf.stack([*component_words, *[tf.constant(0, tf.int64)] * (_WORDS - len(component_words))])


def _mixed(values: list[tuple[tf.Tensor, tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor]:
    """Combines several pairs (checksum, whether rows differ) into one."""
    checksums, rows_differ = zip(*values)
    total = functools.reduce(lambda total, value: total * 31 + value, checksums)
    return total, functools.reduce(tf.logical_or, rows_differ)


def _has_digest(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype not in (tf.variant, tf.resource)


def _checksum(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a checksum of a tensor (int64), and whether its rows differ.

    Uses few operations, because every iterator of a dataset prepares them again, which costs more than running them.
    """
    row_fingerprints = _fingerprints(value if value.shape.rank != 0 else value[tf.newaxis])
    return _fingerprints(row_fingerprints[tf.newaxis])[0], tf.reduce_any(row_fingerprints != row_fingerprints[:1])


def _fingerprints(rows: tf.Tensor) -> tf.Tensor:
    """Returns one int64 for each row of a tensor of any dtype."""
    if rows.dtype == tf.string:  # for rows without strings Fingerprint returns uninitialized memory
        rows = tf.strings.to_hash_bucket_fast(rows, 2**62)
    return tf.bitcast(tf.raw_ops.Fingerprint(data=rows, method="farmhash64"), tf.int64)


# ---- at the start of a step ------------------------------------------------------------------------------------------


class StepHeader(NamedTuple):
    """The data that ranks exchange before a step."""

    counts: tf.Tensor  # rows of every rank, [ranks] int64; of several components: [ranks, components]
    batch: Any  # for use in the step
    gathered: tf.Tensor  # the collective's result, with one row from every rank


def exchange_step_header(rows: tf.Tensor, batch: Any, name: str) -> StepHeader:
    """Exchanges the ranks' numbers of rows, notes of batches and signals (notice.py), in one collective before a step.

    The notes of batches are compared. COLLECTIVE; asynchronous in a graph.

    rows: of this rank's batch (scalar), or of several components of it (a vector of known length).
    """
    several = rows.shape[0] if rows.shape.rank else 1
    # Wait for the batch: it has then been noted, and in a timeline this collective shows when the batch was ready.
    leaves = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if tf.is_symbolic_tensor(leaf)]
    if not check_is_on():
        with tf.control_dependencies(leaves):
            own = tf.concat([tf.reshape(rows, [several]), notice.own()], 0)
        gathered = ops.all_gather(own[tf.newaxis], name=name)
        with tf.control_dependencies([notice.record(gathered[:, several])]):
            return StepHeader(_counts(gathered, rows), batch, gathered)
    notes = _notes()
    with tf.control_dependencies(leaves):
        noted = notes.noted.read_value()
        is_new = noted != notes.compared.read_value()  # read before the verdict sets it: else every step would wait
        own = tf.concat([tf.reshape(rows, [several]), notice.own(), tf.reshape(notes.list.read_value(), [-1])], 0)
    gathered = ops.all_gather(own[tf.newaxis], name=name)
    verdict = _compare(gathered[:, several + 1 :], noted)
    with tf.control_dependencies([verdict, notice.record(gathered[:, several])]):
        counts = _counts(gathered, rows)
    return StepHeader(counts, _after(verdict, is_new, batch), gathered)


def _counts(gathered: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    return tf.identity(gathered[:, : rows.shape[0]] if rows.shape.rank else gathered[:, 0])


def header_bytes(components: int = 1) -> int:
    """Returns the bytes that each rank sends in `exchange_step_header`, given the number of components with rows."""
    return int(tf.int64.size) * (components + 1 + (_NOTES * (1 + _WORDS) if check_is_on() else 0))


def check_is_on() -> bool:
    """Whether batches are compared at all."""
    return bool(config.get("DATA_CHECK_BATCHES") > 0)


def _compare(reports: tf.Tensor, noted: tf.Tensor) -> tf.Tensor:
    """Compares the ranks' notes ([ranks, ...]), which are the same on every rank.

    Returns: True, computed after an op that fails on every rank if batches differ in all components whose rows differ.
        `translate_errors` knows the error of this op.
    Cost: a few operations if all ranks have noted the same so far; otherwise 0.1 ms in Python.
    """

    def look() -> tf.Tensor:
        text = tf.numpy_function(_difference, [reports], tf.string)
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.equal(text, ""), data=[text])]):
            return tf.constant(True)

    are_equal = tf.reduce_all(tf.equal(reports, reports[:1]))
    with tf.control_dependencies([tf.cond(are_equal, lambda: tf.constant(True), look)]):
        compared = _notes().compared.assign(noted)
    with tf.control_dependencies([compared]):
        return tf.constant(True)


def _difference(reports: np.ndarray) -> bytes:
    """Returns the error message for the first batch whose rows differ between ranks; b"": no batch differs."""
    lists = reports.reshape(len(reports), _NOTES, 1 + _WORDS)
    mine, theirs = lists[:1, np.newaxis], lists[:, :, np.newaxis]  # notes of rank 0; notes of every rank
    same = (mine[..., 0] == theirs[..., 0]) & (mine[..., 0] > 0)  # [ranks, notes, notes of rank 0]
    unequal = same[..., np.newaxis] & (mine[..., 1:] != theirs[..., 1:])  # and words
    agree = np.any((mine[..., 1:] == theirs[..., 1:]) & (mine[..., 1:] % 2 != 0), axis=-1)
    differ = unequal.any(axis=-1)
    keys = np.broadcast_to(theirs[..., 0], differ.shape)
    other_rows = differ & ~agree
    if other_rows.any():
        packed = int(keys[other_rows].min())
        key, first = BatchKey.of(packed), other_rows & (keys == packed)
        ranks = " ".join(map(str, np.flatnonzero(first.any(axis=(1, 2)))))
        forget_notes()  # so that a later fit can succeed
        return (
            f"keras_ddl: {_RULE}, because each rank keeps its own rows of every batch. Received: batch {key.batch} "
            f"of pass {key.pass_} over dataset {key.dataset} differs on rank(s) [{ranks}] from "
            f"that on rank 0 (in {_listed(key, np.flatnonzero(unequal[first].any(axis=0)))}). {_CAUSES}"
        ).encode()
    if differ.any() and _notes().unlike is None:
        key = BatchKey.of(int(keys[differ].max()))
        _notes().unlike = key.batch, _listed(key, np.flatnonzero(unequal.any(axis=(0, 1, 2))))
    return b""


def _after(verdict: tf.Tensor, is_new: tf.Tensor, values: Any) -> Any:
    """Returns `values`, available only after the verdict if this rank's batch is being compared."""
    if tf.executing_eagerly():
        return values
    # A branch runs as soon as its own operands are ready, so the other branch does not wait for the verdict.
    gate = tf.cond(is_new, lambda: tf.identity(verdict), lambda: tf.constant(True))

    def gated(leaf: Any) -> Any:
        return tf.identity(leaf) if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable) else leaf

    with tf.control_dependencies([gate]):
        return tf.nest.map_structure(gated, values)


# ---- in words --------------------------------------------------------------------------------------------------------

_CAUSES = (
    "Possible causes: a shuffle without a seed (also inside interleave, flat_map or sample_from_datasets), "
    "interleave(deterministic=False), a generator or PyDataset with its own random generator, or files listed in "
    'another order. Use the same seeds and order on all ranks, or use keras_ddl.Strategy(reader="rank0"), with '
    "which rank 0 reads and sends every rank its rows. If each rank has its own data, use "
    "strategy.distribute_datasets_from_function. If the only difference is random augmentation of data without "
    "labels, set KERAS_DDL_DATA_CHECK_BATCHES=0, which stops the comparison."
)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Like ops.translate_errors, also for errors of streams from rank 0."""
    try:
        with ops.translate_errors():
            yield
    except tf.errors.OpError as error:
        failure = streams.failure_in(error.message or "")
        if failure is None:
            raise
        raise failure from error


def warn_of_unlike_values(rank: int) -> None:
    """Warns, once per process and on rank 0, if batches have the same rows but different values."""
    if _notes.cache_info().currsize == 0 or rank != 0:
        return
    notes = _notes()
    if notes.unlike is None or notes.has_warned:
        return
    notes.has_warned = True
    batch, which = notes.unlike
    stack_position.warn(
        f"All ranks must read the same batches. Received: batch {batch} differs between ranks in {which}, "
        "while another component is equal. Augmentation in threads or with unseeded random numbers causes this. It "
        "does no harm, but the values differ from those of one process. If the data is not augmented, look for the "
        "cause."
    )


def _listed(key: BatchKey, words: np.ndarray) -> str:
    """Returns the dataset's names for the components with these words of a digest."""
    names = _components.get(key.dataset, [])
    labels = [names[word] if word < len(names) else f"component {word}" for word in words if word < _WORDS - 1]
    rest = names[_WORDS - 1 :] or [f"component {_WORDS - 1}"]
    return ", ".join([*labels, *([" or ".join(rest)] if _WORDS - 1 in words else [])])


def _names(spec: Any) -> list[str]:
    usual = ("x", "y", "sample_weight")
    names = []
    for path, leaf in keras.tree.flatten_with_path(spec):
        if isinstance(leaf, tf.OptionalSpec):
            continue
        parts = list(path)
        if isinstance(spec, tuple) and len(spec) <= 3 and parts:
            parts[0] = usual[parts[0]]
        names.append("/".join(map(str, parts)) or "x")
    return names
