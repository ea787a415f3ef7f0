"""`Strategy.function`: a training step of one's own, the same on any number of ranks as in one process.

The step is traced as one process would trace it, on the whole batch, and its graph is cut into ranks (keras_ddl/cut).
No part of Keras is changed for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from keras_ddl import communicator, config, cut, ops
from keras_ddl.communicator import comparison
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.cut.placements import REPLICATED, Placement, Sharded
from keras_ddl.data import chunk, order
from keras_ddl.errors import ConfigError, RankMismatchError
from keras_ddl.strategy import sharded_slots, whole_slots
from keras_ddl.strategy.composites import Composites, is_composite
from keras_ddl.strategy.failing_together import together
from keras_ddl.strategy.whole_step import WholeStep, is_traced

_FIRST = 3  # calls whose arguments are compared, beside every KERAS_DDL_DATA_CHECK_BATCHES-th


class StepFunction:
    """What `Strategy.function` returns. See there."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        batches: str,
        reduce_retracing: bool,
        strategy: Any,
        number: int,
    ) -> None:
        self.__wrapped__ = step
        self._options = {"batches": batches, "reduce_retracing": reduce_retracing}
        self._strategy = strategy
        self._of_objects: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        self._function = (
            step
            if isinstance(step, tf.types.experimental.PolymorphicFunction)
            else tf.function(step, reduce_retracing=reduce_retracing)
        )
        self._reduce_retracing = reduce_retracing
        self._batches, self.rank, self._size = batches, strategy.rank, strategy.size
        self._scope = f"{self.__name__}_{number}"
        self.whole_step = WholeStep(self.__name__, self._scope, strategy)
        self._calls = 0
        self._traces = 0
        self._traced: dict[Hashable, _Traced] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step. COLLECTIVE. Returns: what one process would get, on every rank."""
        if self._size == 1 or is_traced():  # within another step of the whole batch
            return self._function(*args, **kwargs)
        if not tf.executing_eagerly():
            raise ConfigError(
                f"{self.__name__}: a step of Strategy.function is a tf.function of its own, and must be called outside "
                f"other functions. Received: a call while another function is traced (rank {self.rank}). Leave out the "
                "tf.function around it, or put strategy.function in its place."
            )
        self._calls += 1  # on all ranks, whatever happens
        self._traces = self.whole_step.traces
        return together(lambda: self._call(args, kwargs), self)

    def _call(self, args: Any, kwargs: Any) -> Any:
        arguments = Composites(tf.nest.map_structure(_tensor, (args, kwargs)), own_rows=self._batches == "rank")
        leaves = tf.nest.flatten(arguments.structure, expand_composites=True)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        self._compare(tensors, arguments)
        traced = self._find(arguments, leaves)
        with ops.translate_errors():
            return traced(tensors)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the step as a method of `instance`: each object's is traced for itself, as by tf.function."""
        if instance is None:
            return self
        key = id(instance)  # what is compared by its fields has no hash
        if key not in self._of_objects:
            reference = weakref.ref(instance, lambda _: self._of_objects.pop(key, None))
            step = _method(self.__wrapped__, instance, reference)
            self._of_objects[key] = reference, self._strategy.function(step, **self._options)
        return self._of_objects[key][1]

    # The three of failing_together.Undo.

    def may_have_traced(self, is_python: bool) -> bool:
        return self.whole_step.traces != self._traces

    def restore(self) -> None:
        self.whole_step.restore()

    def forget_traces(self) -> None:
        self._traced.clear()
        self.whole_step.forget_traces()

    def explain(self) -> str:
        """Returns a table of the collectives of each trace: bytes, reason, and the line of the step."""
        return self.whole_step.explain()

    def _compare(self, tensors: list[tf.Tensor], arguments: Composites) -> None:
        """Checks now and then that all ranks were given the same."""
        call, every = self._calls - 1, config.get("DATA_CHECK_BATCHES")
        if not every or not (call < _FIRST or call % every == 0):
            return
        look: Any = [(each.dtype.name, each.shape.as_list()) for each in tensors]
        if self._batches == "global":
            look = [look, order.digest(tensors).numpy().tolist()]
        else:
            look = [arguments.kind, [(name, shape[1:] if shape else shape) for name, shape in look]]
        all_looks = communicator.all_gather_object(look, name=f"{self._scope}/arguments")
        other = comparison.other_rank(all_looks)
        if other is not None:
            raise RankMismatchError(
                f"{self.__name__}: all ranks must call a step with "
                + ("the same whole batch" if self._batches == "global" else "tensors of the same dtypes and extents")
                + f". Received in call {call}: other arguments on rank {other} than on rank 0 (rank {self.rank}). "
                "Read the same data in the same order on every rank; if each rank has rows of its own, use "
                'strategy.function(step, batches="rank").'
            )

    def _find(self, arguments: Composites, leaves: list[Any]) -> _Traced:
        tensors, rows = [leaf for leaf in leaves if tf.is_tensor(leaf)], arguments.rows
        parts = arguments.shapes()
        cuts = tuple(
            part is None and bool(each.shape.rank) and each.shape[0] == rows for part, each in zip(parts, tensors)
        )
        constants = tuple(_constant(leaf) for leaf in leaves if not tf.is_tensor(leaf))
        places = tuple(tf.is_tensor(leaf) for leaf in leaves)
        kind: Hashable = (
            arguments.kind, constants, places, cuts, tuple((each.dtype, each.shape.rank) for each in tensors)
        )  # fmt: skip
        shapes = [tuple(each.shape if part is None else part) for part, each in zip(parts, tensors)]
        if self._reduce_retracing:
            return self._find_open(kind, arguments, leaves, cuts, shapes)
        counts = self._counts(rows)
        shapes = [(sum(counts), *shape[1:]) if is_cut and counts else shape for shape, is_cut in zip(shapes, cuts)]
        kind = (kind, tuple(shapes), counts, rows)
        if kind not in self._traced:
            self._traced[kind] = self._trace(arguments, leaves, cuts, shapes, counts)
        return self._traced[kind]

    def _counts(self, rows: int | None) -> tuple[int, ...]:
        """The rows of every rank, where each has its own: what one process traces depends on them all."""
        if self._batches == "global" or rows is None:
            return ()
        return tuple(communicator.all_gather_object(rows, name=f"{self._scope}/rows"))

    def _find_open(
        self, kind: Hashable, arguments: Composites, leaves: list[Any], cuts: tuple[bool, ...], shapes: list[Any]
    ) -> _Traced:
        """As tf.function(reduce_retracing=True): extents that change are left open, from the second size on."""
        before = self._traced.get(kind)
        if before is not None and before.takes(shapes):
            return before
        if before is not None:
            shapes = [_common(one, other) for one, other in zip(before.shapes, shapes)]
        if before is not None or self._batches == "rank":
            shapes = [(None, *shape[1:]) if is_cut else shape for shape, is_cut in zip(shapes, cuts)]
        self._traced[kind] = self._trace(arguments, leaves, cuts, shapes, ())
        return self._traced[kind]

    def _trace(
        self,
        arguments: Composites,
        leaves: list[Any],
        cuts: tuple[bool, ...],
        shapes: list[Any],
        counts: tuple[int, ...],
    ) -> _Traced:
        places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        specs = [tf.TensorSpec(shape, leaves[i].dtype) for i, shape in zip(places, shapes)]
        constants = [leaf.variable if isinstance(leaf, _Held) else leaf for leaf in leaves]
        known = None if self._reduce_retracing else sum(counts) or arguments.rows
        structure = arguments.specs(known)

        @do_not_convert
        def whole(*tensors: Any) -> Any:
            given = list(constants)
            for place, tensor in zip(places, tensors):
                given[place] = tensor
            args, kwargs = tf.nest.pack_sequence_as(structure, given, expand_composites=True)
            return self._function(*args, **kwargs)

        concrete = self.whole_step.trace(whole, specs)
        states: list[Placement] = [Sharded(0) if each else REPLICATED for each in cuts]
        found = _Traced(self, concrete, arguments.without_tensors(), shapes, states, counts)
        self._check_same(self.whole_step.reports[-1])
        return found

    def _check_same(self, report: cut.Report) -> None:
        digests = communicator.all_gather_object(report.digest(), name=f"{self._scope}/traced")
        other = comparison.other_rank(digests)
        if other is not None:
            raise RankMismatchError(
                f"{self.__name__}: all ranks must trace the same step. Received: other operations on rank {other} than "
                f"on rank 0 (rank {self.rank}). Leave out what depends on the rank; keras_ddl.rank() has its place "
                "around the step."
            )

    def build(
        self,
        program: cut.Program,
        arguments: Composites,
        states: list[Placement],
        counts: tuple[int, ...],
        local: list[tf.Tensor],
    ) -> list[Any]:
        """Makes this rank's graph of a traced step, from its arguments in the graph that is being traced."""
        batches = [each for each, state in zip(local, states) if isinstance(state, Sharded)]
        rows = arguments.local_rows(local) if self._reduce_retracing else arguments.rows
        report = cut.Report()
        return self.whole_step.build(
            program,
            arguments.whole(local, self.rank, self._scope, report),
            states,
            self._batch(_rows_of(batches[0]) if batches else rows, counts, report),
            report,
            inputs_are_whole=self._batches == "global",
            tell=arguments.tell,
        )

    def _batch(self, rows: Any, counts: tuple[int, ...], report: cut.Report) -> cut.Batch:
        if counts:
            return cut.Batch(sum(counts), counts[self.rank], sum(counts[: self.rank]))
        if rows is None:
            return cut.Batch(1, int(self.rank == 0), min(self.rank, 1))
        if self._batches == "global":
            first, end = chunk(rows, self.rank, self._size)
            return cut.Batch(rows, end - first, first)
        counts = ops.all_gather(tf.reshape(tf.cast(rows, tf.int64), [1]), name=f"{self._scope}/rows")
        report.gathered_counts(self._size * tf.int64.size)
        return cut.Batch(tf.reduce_sum(counts), tf.cast(rows, tf.int64), tf.reduce_sum(counts[: self.rank]))


class _Traced:
    """The step for arguments of one kind."""

    def __init__(
        self,
        owner: StepFunction,
        concrete: Any,
        arguments: Composites,
        shapes: list[Any],
        states: list[Placement],
        counts: tuple[int, ...],
    ) -> None:
        self.shapes = shapes
        program = cut.Program(concrete.graph)
        self._name = owner.__name__
        of_captured = (sharded_slots.of_handle(outer) for _, outer in program.captured)
        self._slots = [each for each in of_captured if each is not None]
        structured = concrete.graph.structured_outputs
        self._outputs = tf.nest.flatten(structured, expand_composites=True)
        self._structured = structured
        local = shapes
        if counts:
            mine = counts[owner.rank]
            local = [
                (mine, *shape[1:]) if isinstance(state, Sharded) else shape for shape, state in zip(shapes, states)
            ]
        specs = [tf.TensorSpec(shape, each.dtype) for shape, each in zip(local, concrete.inputs)]

        @do_not_convert
        def rank_step(*local: tf.Tensor) -> list[tf.Tensor]:
            return owner.build(program, arguments, states, counts, list(local))

        self._run = tf.function(rank_step, autograph=False).get_concrete_function(*specs)

    def takes(self, shapes: list[Any]) -> bool:
        """Whether these shapes of arguments are among those that it was traced for."""
        return all(tf.TensorShape(own).is_compatible_with(given) for own, given in zip(self.shapes, shapes))

    def __call__(self, tensors: list[tf.Tensor]) -> Any:
        whole_slots.refuse_step(self._name, lambda: self._slots)
        found = iter(tf.nest.flatten(self._run(*tensors)))
        filled = [next(found) if tf.is_tensor(each) else each for each in self._outputs]
        return tf.nest.pack_sequence_as(self._structured, filled, expand_composites=True)


def _method(step: Any, instance: Any, reference: weakref.ref[Any]) -> Callable[..., Any]:
    """Returns `step` with its first argument given, without keeping the object alive."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return step.__get__(instance, type(instance))

    def method(*args: Any, **kwargs: Any) -> Any:
        return step(reference(), *args, **kwargs)

    method.__name__ = getattr(step, "__name__", "method")
    return method


class _Held:
    """A variable among the arguments, which the step may assign: not to be taken for its value."""

    def __init__(self, variable: tf.Variable) -> None:
        self.variable = variable


def _tensor(leaf: Any) -> Any:
    """Arrays and tensors are arguments of the traced step; numbers, texts, variables and objects constants of it."""
    if isinstance(leaf, tf.Variable):
        return _Held(leaf)
    if is_composite(leaf):
        return leaf
    return tf.convert_to_tensor(leaf) if tf.is_tensor(leaf) or isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _rows_of(tensor: tf.Tensor) -> Any:
    return tf.shape(tensor, out_type=tf.int64)[0] if tensor.shape[0] is None else tensor.shape[0]


def _constant(leaf: Any) -> Hashable:
    leaf = leaf.variable if isinstance(leaf, _Held) else leaf
    return leaf if isinstance(leaf, (int, float, str, bytes, bool, type(None))) else ("object", id(leaf))


def _common(one: Any, other: Any) -> tuple[int | None, ...]:
    return tuple(a if a == b else None for a, b in zip(one, other))
