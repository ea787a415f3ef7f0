"""Steps of Keras (train_step, test_step, predict_step) on several ranks: what one process would compute.

Keras calls them through `Strategy.run`, with this rank's rows of the batch. In a graph the step is traced on the whole
batch and cut into ranks (whole_step.py). Run eagerly there is no graph to be cut: the rows of all ranks are gathered,
and every rank computes the step on all of them, which is right, and no faster than one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import communicator, cut
from keras_ddl.communicator import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.compat.thread_value import ThreadValue
from keras_ddl.cut.extents import Extents
from keras_ddl.cut.program import Value
from keras_ddl.cut.states import WHOLE, Rows
from keras_ddl.data import notice, order
from keras_ddl.data.rows import BatchRows, chunk, gather_rows, row_count
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.batch_kinds import BatchKind
from keras_ddl.strategy.composites import tell_rows
from keras_ddl.strategy.rows_trained import RowsTrained
from keras_ddl.strategy.whole_step import WholeStep, as_one_process

_STEPS = ("train_step", "test_step", "predict_step")
# Of the exchange with which a step begins; a timeline tells by it when the batch was there, and whether the step waits.
_NAME, _NAME_OF_NEEDED = "rows", "needed_rows"


UNKNOWN = BatchRows()
LOCAL = BatchRows(is_local=True)


class _Batches:
    """The batches for which steps are traced: what is known of their rows, their kind, and how many steps were."""

    def __init__(self, rows: BatchRows, kind: BatchKind | None, is_single: bool) -> None:
        self.rows, self.kind, self.is_single, self.steps = rows, kind, is_single, 0


_batches = ThreadValue(_Batches(UNKNOWN, None, False))


def with_rows(rows: BatchRows, kind: BatchKind | None = None, *, is_single: bool = False) -> Any:
    """Returns a context in which steps of Keras are traced for batches of which so much is known.

    is_single: they are called with a batch, not with an iterator: then their kernels are others in one process, too.
    """
    return _batches.set_to(_Batches(rows, kind, is_single))


def model_of(function: Any) -> tuple[Any, str] | None:
    """Returns the model whose step `function` is and the step's name, or None for a function of the program's own."""
    model, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(model, keras_compat.Trainer):
        return (model, name) if name in _STEPS else None
    if getattr(function, "__module__", None) != keras_compat.tf_trainer.__name__:
        return None
    model = next((each for each in _cells(function) if isinstance(each, keras_compat.Trainer)), None)
    return None if model is None else (model, "predict_step")  # in Keras's wrapper


def _cells(function: Any) -> list[Any]:
    found = []
    while function is not None:
        found += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = getattr(function, "__wrapped__", None)
    return found


class KerasSteps:
    """The steps of the models that train under a Strategy of several ranks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._steps: weakref.WeakKeyDictionary[Any, dict[str, WholeStep]] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()  # whose eager steps were warned of
        self.rows_trained = RowsTrained()  # on rank 0, which shows them
        notice.prepare()

    # In a tf.function of the program's own, autograph would convert the cut, too: half a minute for five layers.
    @do_not_convert
    def run(self, model: Any, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a step of `model` with this rank's rows. COLLECTIVE. Returns: what one process would get."""
        if _batches.get().rows.is_local:
            with as_one_process():
                return function(*args, **kwargs)
        if tf.executing_eagerly():
            return self._run_whole(model, name, function, args, kwargs)
        return self._run_cut(model, name, function, args, kwargs)

    def steps_of(self, model: Any) -> list[WholeStep]:
        """Returns the steps of `model` that were traced."""
        return list(self._steps.get(model, {}).values())

    def explain(self, model: Any) -> str:
        """See Strategy.explain."""
        tables = [table for step in self.steps_of(model) for table in step.tables()]
        if not tables:
            raise ConfigError(
                "Strategy.explain tells of steps that were traced. Received: model "
                f"{model.name!r}, of which none was (rank {self._strategy.rank}). Call fit, evaluate or predict; "
                "with run_eagerly=True there is no graph of a step."
            )
        return "\n\n".join(tables)

    def step_of(self, model: Any, name: str) -> WholeStep:
        steps = self._steps.setdefault(model, {})
        if name not in steps:
            label = models.plain_name(model.name)
            steps[name] = WholeStep(f"{type(model).__name__}.{name}", f"{label}/{name}", self._strategy)
        return steps[name]

    def _run_whole(self, model: Any, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._strategy.rank == 0:
            self._tell_once(f"{type(model).__name__}.{name}")
        share = self._strategy.extended.share
        args, kwargs = share.begin_step(tf.nest.map_structure(_as_tensor, (args, kwargs)))  # train_on_batch has arrays
        leaves = tf.nest.flatten((args, kwargs))
        whole = [self._gathered(leaf, f"{name}/batch_{i}") for i, leaf in enumerate(leaves)]
        args, kwargs = tf.nest.pack_sequence_as((args, kwargs), whole)
        step = self.step_of(model, name)
        step.copy_eagerly(models.written_by_steps(model))
        with as_one_process():
            found = function(*args, **kwargs)
        communicator.barrier(name=f"{step.scope}/commit")
        step.copy_eagerly([])
        if name == "train_step" and self._strategy.rank == 0:
            self.rows_trained.add(share.counts())
        return found

    def _tell_once(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            stack_position.warn(
                f"{name} runs eagerly: every rank computes all rows of every batch, which is right and no faster than "
                "one process. Leave out run_eagerly=True to share the work."
            )

    def _gathered(self, leaf: Any, name: str) -> Any:
        if not _is_tensor(leaf) or _rank(leaf) == 0:
            return leaf
        return gather_rows(leaf, self._strategy.rank, name=name)

    def _run_cut(self, model: Any, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        step = self.step_of(model, name)
        batches, (rank, size) = _batches.get(), (step.rank, step.size)
        known = batches.rows
        arguments = tf.nest.map_structure(_as_tensor, (args, kwargs))
        rows, report = row_count(arguments), cut.Report()
        counts, begins_with = None, None
        if rows is None:  # nothing to share: every rank computes all of it
            batch = cut.Batch(1, int(rank == 0), min(rank, 1))
        else:
            is_known = known.is_chunked and known.total is not None
            name_of_exchange = _NAME if is_known else _NAME_OF_NEEDED
            counts, arguments, begins_with = order.begin_step(rows, arguments, name_of_exchange)
            report.gathered_counts(size * order.step_bytes())
            if is_known:
                first, end = chunk(known.total, rank, size)
                batch = cut.Batch(known.total, end - first, first)
            else:
                total = tf.reduce_sum(counts) if known.total is None else known.total
                batch = cut.Batch(total, counts[rank], tf.reduce_sum(counts[:rank]))
        leaves = tf.nest.flatten(arguments)
        places = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
        constants = [None if _is_tensor(leaf) else leaf for leaf in leaves]
        first_rows = next((_static_rows(leaves[i]) for i in places if _rank(leaves[i]) != 0), None)
        others = known.of_others if known.is_chunked else frozenset()
        kind, wholes = _kind_and_specs(batches, len(places))
        specs, local = [], []
        states: list[Any] = []
        for number, place in enumerate(places):
            leaf = leaves[place]
            if isinstance(leaf, tf.Tensor) and leaf.shape.rank and place not in others:
                whole = tf.TensorSpec([known.total, *leaf.shape[1:]], leaf.dtype)
                specs.append(whole if wholes is None else wholes[number])
                local.append(_checked(leaf, first_rows, rows, step, place))
                states.append(Rows(0))
            else:
                whole = self._gathered(leaf, f"{step.scope}/batch_{place}")
                specs.append(_open_spec(whole))
                components = tf.nest.flatten(whole, expand_composites=True)
                if _rank(leaf) != 0:
                    report.gathered_argument(_kind(leaf), len(components))
                local += components
                states += [WHOLE] * len(components)

        def parts() -> list[tf.Variable]:
            return _accumulators(model) if known.accumulates_parts else []

        @do_not_convert
        def whole_step(*tensors: Any) -> Any:
            given = list(constants)
            for place, tensor in zip(places, tensors):
                given[place] = tensor
            args, kwargs = tf.nest.pack_sequence_as(arguments, given)
            return function(*args, **kwargs)

        concrete = None if kind is None else kind.traces.get(batches.steps)
        if concrete is None:
            concrete = step.trace(whole_step, specs, parts=parts)
        if kind is not None:
            kind.traces[batches.steps] = concrete
            graph = batches.steps, batches.is_single
            if graph in kind.built:
                step.warn_of_kernels_that_begin_anew(concrete)
            kind.built.add(graph)
            batches.steps += 1
        keeps_rows = name == "predict_step" and self._strategy.gather_predictions == "rank0" and rank != 0
        outputs = iter(
            step.build(
                cut.Program(concrete.graph),
                local,
                states,
                batch,
                report,
                begins_with=begins_with,
                keeps_rows=keeps_rows,
                parts=[each.handle for each in parts()],
                tell=lambda extents, values: _tell(extents, values, specs),
            )
        )
        if counts is not None and name == "train_step" and rank == 0:
            with tf.control_dependencies([step.committed]):
                self.rows_trained.add(counts)
        structured = concrete.graph.structured_outputs
        flat = tf.nest.flatten(structured, expand_composites=True)
        filled = [next(outputs) if tf.is_tensor(each) else each for each in flat]
        return tf.nest.pack_sequence_as(structured, filled, expand_composites=True)


def _kind_and_specs(batches: _Batches, tensors: int) -> tuple[BatchKind | None, Sequence[Any] | None]:
    """Returns the kind of the batch of the step that is traced now, and the type specs of its tensors, if known."""
    kind = batches.kind
    begin = batches.steps * tensors
    if kind is None or tensors == 0 or len(kind.specs) % tensors or begin + tensors > len(kind.specs):
        return None, None
    return kind, kind.specs[begin : begin + tensors]


def _accumulators(model: Any) -> list[tf.Variable]:
    """The variables in which each rank accumulates its part of gradients between updates."""
    return [each.value for each in models.accumulators_of(model)]


def _is_tensor(leaf: Any) -> bool:
    return (tf.is_tensor(leaf) or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))) and not isinstance(
        leaf, tf.Variable
    )


def _as_tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "__array__") and not tf.is_tensor(leaf) else leaf


def _kind(leaf: Any) -> str:
    """What the report calls an argument of which every rank has all rows."""
    if isinstance(leaf, tf.RaggedTensor):
        return "ragged"
    return "sparse" if isinstance(leaf, tf.SparseTensor) else "whole"


def _rank(leaf: Any) -> int | None:
    return leaf.shape.rank


def _static_rows(leaf: Any) -> int | None:
    return leaf.shape[0] if leaf.shape.rank else None


def _checked(leaf: tf.Tensor, first_rows: int | None, rows: tf.Tensor, step: WholeStep, place: int) -> tf.Tensor:
    """Returns a leaf that certainly has as many rows as the batch's first.

    Raises: ConfigError: it has not; where only the running step tells, TensorFlow's error with the same words.
    """
    mine = _static_rows(leaf)
    rule = (
        "The tensors of a batch must have equally many rows, or come from a dataset whose spec tells how many each has "
        f"(drop_remainder=True). Received: component {place} of the batch of {step.name} has another number of rows "
        f"than the first (rank {step.rank})."
    )
    if mine is not None and first_rows is not None:
        if mine != first_rows:
            raise ConfigError(rule)
        return leaf
    equal = tf.debugging.assert_equal(tf.shape(leaf, out_type=tf.int64)[0], rows, f"keras_ddl: {rule}")
    with tf.control_dependencies([equal]):
        return tf.identity(leaf)


def _tell(extents: Extents, values: Sequence[Value], specs: list[Any]) -> list[Value]:
    """Tells the cut which arguments that it has whole have the rows of the batch."""
    found: list[Value] = []
    rest = list(values)
    for spec in specs:
        count = len(tf.nest.flatten(spec, expand_composites=True))
        parts, rest = rest[:count], rest[count:]
        if count > 1 and spec.shape.rank is not None:
            tell_rows(extents, spec, parts)
            found += parts
    return found


def _open_spec(whole: Any) -> Any:
    """Returns the spec of a gathered leaf, whose rows are not this rank's."""
    if isinstance(whole, tf.RaggedTensor):
        shape = [None, *whole.shape[1:]]
        return tf.RaggedTensorSpec(shape, whole.dtype, whole.ragged_rank, whole.row_splits.dtype)
    if isinstance(whole, tf.SparseTensor):
        rank = whole.shape.rank
        return tf.SparseTensorSpec(None if rank is None else [None, *whole.shape[1:]], whole.dtype)
    return tf.TensorSpec(whole.shape, whole.dtype)
