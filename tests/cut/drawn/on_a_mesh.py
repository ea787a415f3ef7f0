"""Compares a drawn program under a drawn layout, on a simulated mesh, with one process.

Each weight is a variable, cut along any axis that the model ranks divide or along none, whatever the program does with
it. After the gradients the program updates the weights and slots for some of them, whose layouts are drawn separately.
Most layouts make no sense; the results must be equal anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cut.comparing import difference
from cut.drawn.agreement import Arrays, NoVerdict, is_unstable
from cut.drawn.programs import WEIGHTS, WHOLES, Program, arguments, wholes
from cut.mesh import Mesh, Position

from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

_STEPS = 2


def drawn_layout(variables: Sequence[tf.Variable], ranks: int, rng: np.random.Generator) -> dict[int, int]:
    """Returns a random layout, {id of a variable: axis}, of axes whose extent `ranks` divides."""
    layout = {}
    for each in variables:
        possible = [axis for axis, extent in enumerate(each.shape) if extent and extent % ranks == 0]
        if possible and rng.random() < 0.7:
            layout[id(each)] = int(rng.choice(possible))
    return layout


def weights_of(seed: int) -> tuple[str, ...]:
    """Returns the names of two weights that programs with this seed have in addition to the common ones."""
    return tuple(sorted(np.random.default_rng(seed).choice(list(WEIGHTS), 2, replace=False).tolist()))


def disagreement(program: Program, shape: Position) -> str | None:
    """Describes how a rank of a mesh differs from one process, or returns None.

    Raises: NoVerdict: one process cannot run it, an error refuses it by name, or rounding decides its results.
    """
    if program.types() is None:
        raise NoVerdict
    step = _Step(program)
    rng = np.random.default_rng([program.seed, *shape])
    layout = drawn_layout(step.variables, shape[1], rng)
    told = f"{shape}, {[(each.name, layout[id(each)]) for each in step.variables if id(each) in layout]}\n{program}"
    batches = [arguments(program.seed, rows) for rows in program.batches]
    try:
        mesh = Mesh(step, batches[0], shape, step.variables, layout, static=program.static, along_batch=shape[0] > 1)
    except ConfigError as error:
        if "Leave the variable out of the layout" in str(error):
            raise NoVerdict from None
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{told}"
    for rows in batches:
        differs = _differs(mesh, step, rows)
        if differs is not None:
            return f"{len(rows[0])} rows: {differs}\n{told}"
    return None


class _Step:
    """A training step of a program. Its variables are the weights, and a slot for each of the last two."""

    def __init__(self, program: Program) -> None:
        self.program = program
        names = [*WHOLES, *program.weights]
        self.first = wholes(program.seed, program.weights)
        self.weights = [tf.Variable(each, name=name) for name, each in zip(names, self.first)]
        self.slots = [tf.Variable(each * 0.1, name=f"{name}_slot") for name, each in zip(names[-2:], self.first[-2:])]
        self.variables = [*self.weights, *self.slots]
        self.update = _UPDATES[program.seed % len(_UPDATES)]
        self.reads_inside = program.seed // 2 % 2 == 1  # reads weights where they are used, also in loops and branches

    def restart(self) -> None:
        for weight, first in zip(self.weights, self.first):
            weight.assign(first)
        for slot, first in zip(self.slots, self.first[-2:]):
            slot.assign(first * 0.1)

    def __call__(self, *rows: Any) -> list[Any]:
        given = self.weights if self.reads_inside else [each.read_value() for each in self.weights]
        outputs = self.program(*rows, *given)
        gradients = [0.1 * tf.tanh(each) for each in outputs[-len(self.weights) :]]
        for weight, gradient in zip(self.weights[:-2], gradients):
            weight.assign_sub(gradient)
        for weight, slot, gradient in zip(self.weights[-2:], self.slots, gradients[-2:]):
            self.update(weight, slot, gradient)
        return [*outputs, tf.stack([tf.reduce_sum(each**2) for each in self.variables])]


def _momentum(weight: Any, slot: Any, gradient: Any) -> None:
    slot.assign(0.9 * slot + gradient)
    weight.assign_sub(slot)


def _of_rows(weight: Any, slot: Any, gradient: Any) -> None:
    slot.scatter_add(tf.IndexedSlices(gradient[-2:], tf.constant([1, 0])))
    weight.assign_sub(0.1 * slot)


def _either(weight: Any, slot: Any, gradient: Any) -> None:
    positive = tf.reduce_sum(gradient) > 0.0
    tf.cond(positive, lambda: weight.assign_sub(gradient), lambda: weight.assign(weight * 0.5 + slot))
    slot.assign_add(gradient**2)


def _sorted(weight: Any, slot: Any, gradient: Any) -> None:
    weight.assign_sub(gradient / (1.0 + tf.norm(weight)))
    slot.assign(tf.reverse(slot, [-1]) + tf.cumsum(weight))


_UPDATES: list[Callable[[Any, Any, Any], None]] = [_momentum, _of_rows, _either, _sorted]


def _differs(mesh: Mesh, step: _Step, rows: Arrays) -> str | None:
    """Compares some steps, and the variables after them. Raises: NoVerdict."""
    mesh.restart(step.restart)
    for _ in range(_STEPS):
        try:
            wanted = mesh.expected(*rows)
        except tf.errors.OpError:
            raise NoVerdict from None
        wanted += [each.numpy() for each in step.variables]
        try:
            found = mesh(*rows)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        for at, outputs in found.items():
            held = [mesh.complete(each, at[0]) for each in step.variables]
            told = difference([*outputs, *held], wanted)
            if told is not None:
                if is_unstable(lambda given: _one_process_results(mesh, step, given), rows):
                    raise NoVerdict
                return f"rank {at}: {told}"
    return mesh.decisions_differ()


def _one_process_results(mesh: Mesh, step: _Step, rows: Arrays) -> Arrays:
    step.restart()
    outputs = [mesh.expected(*rows) for _ in range(_STEPS)][-1]
    return [*outputs, *(each.numpy() for each in step.variables)]
