"""Exchanges the numbers of rows of a batch's components, and determines the batches along which a step is cut.

A Keras batch may consist of several batches with different numbers of rows, such as many unlabelled and few labelled
images. The rows of each are divided between all ranks. data/rows.py determines which components belong together before
a step is built, and the ranks check this for every batch with the row counts that they exchange when a step starts.
"""

from __future__ import annotations

from typing import Any

from keras_ddl import cut
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import BatchRows
from keras_ddl.strategy.step.arguments import Arguments
from keras_ddl.strategy.step.cut_step import ConcreteFunction, CutStep


class ComponentRows:
    """The rows of the components of a batch, in the graph of a step.

    Args:
        structure: the arguments of the step, with this rank's rows.
        count: the number of rows of this rank's batch.
        rows: the known facts about the rows.
        step: the step to be cut.
    """

    def __init__(self, structure: Any, count: tf.Tensor, rows: BatchRows, step: CutStep) -> None:
        self._rows, self._step = rows, step
        self._batches = _batches_of_components(structure, rows, step)
        self._exchanged = [(0, count)]  # (batch, rows) of each component with an unknown number of rows
        gathered = rows.other_components - {*self._batches}
        for place, leaf in enumerate(tf.nest.flatten(structure)):
            if place in gathered or not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
                continue
            if leaf.shape.rank is None or leaf.shape[0] is None or not rows.is_chunked:
                self._exchanged.append((self._batches.get(place, 0), tf.shape(leaf, out_type=tf.int64)[0]))
        self._checked: tf.Tensor | None = None
        self._counts: tf.Tensor | None = None

    @property
    def exchanged(self) -> tf.Tensor:
        """This rank's row counts ([n] int64), the batch's first."""
        return tf.stack([rows for _, rows in self._exchanged])

    def check(self, gathered: tf.Tensor) -> tf.Tensor:
        """Checks that components that belong together have equal numbers of rows. The result is equal on all ranks.

        gathered: `exchanged` of all ranks, [ranks, n].
        Returns: the rows of the batch, [ranks].
        """
        first = [[batch for batch, _ in self._exchanged].index(batch) for batch, _ in self._exchanged]
        if first == list(range(len(first))):
            self._counts = gathered
            return gathered[:, 0]
        text = (
            f"keras_ddl: {self._step.name}: Components of a batch that had equal numbers of rows in the first batch "
            "must have equal numbers in every batch. Received: {} rows by component, summed over ranks. Use "
            "drop_remainder=True in each dataset that is zipped, or nest the components that have different rows: (x, "
            "(x2, y2))."
        )

        def fail() -> tf.Tensor:
            totals = tf.unique(tf.reduce_sum(gathered, 0))[0]
            failed = tf.raw_ops.Assert(condition=False, data=[tf.strings.format(text, totals)])
            with tf.control_dependencies([failed]):
                return tf.constant(False)

        are_equal = tf.reduce_all(gathered == tf.gather(gathered, first, axis=1))
        self._checked = tf.cond(are_equal, lambda: tf.constant(True), fail)
        with tf.control_dependencies([self._checked]):
            self._counts = tf.identity(gathered)
        return self._counts[:, 0]

    def further_batches(self, arguments: Arguments, concrete: ConcreteFunction) -> list[cut.Batch]:
        """Returns the rows of all batches but the first, in the graph of the step. `concrete`: the traced step.

        Makes the tensors of `arguments` wait for the check.
        """
        known: dict[int, int] = {}
        for batch, component in arguments.sharded():
            rows = concrete.inputs[component].shape[0]
            if batch and rows is not None and self._rows.is_chunked:
                known[batch] = rows
        columns = [batch for batch, _ in self._exchanged]
        further: list[cut.Batch] = []
        for batch in range(1, 1 + max(self._batches.values(), default=0)):
            if batch in known:
                further.append(self._step.batch_of_chunks(known[batch]))
            else:
                assert self._counts is not None
                further.append(self._step.batch_of_counts(self._counts[:, columns.index(batch)]))
        for batch, component in arguments.sharded():
            tensor = arguments.tensors[component]
            if self._checked is not None and tensor.shape[0] is None:
                with tf.control_dependencies([self._checked]):
                    tensor = arguments.tensors[component] = tf.identity(tensor)
            if batch in known:
                tensor.set_shape([further[batch - 1].local, *tensor.shape[1:]])
        return further


def arguments_by_component(structure: Any, rows: BatchRows, step: CutStep) -> Arguments:
    """Returns the arguments of a step, with this rank's rows; the components of all batches are sharded."""
    others, batches = rows.other_components, _batches_of_components(structure, rows, step)
    return Arguments(
        structure,
        has_rows=lambda place, leaf: bool(leaf.shape.rank) and (place not in others or place in batches),
        own_rows=True,
        gathers_others=True,
        batch_of=lambda place: batches.get(place, 0),
    )


def _batches_of_components(structure: Any, rows: BatchRows, step: CutStep) -> dict[int, int]:
    """Returns place -> batch for dense components of batches other than the first. Other components are gathered.

    The step's arguments are one batch, so the places in `rows` are also places among the arguments.
    """
    if not step.shards_further_batches:
        return {}
    leaves = tf.nest.flatten(structure)
    groups = [[place for place in sorted(each) if isinstance(leaves[place], tf.Tensor)] for each in rows.others]
    return {place: number for number, places in enumerate(filter(None, groups), 1) for place in places}
