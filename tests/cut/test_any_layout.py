"""Drawn programs and the zoo's networks equal one process on simulated meshes under any layout.

Layouts are drawn over all variables, so most make no sense. A failure shows the seed, the mesh and the layout.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from cut import zoo
from cut.drawn import control_flow, lines, more_lines, on_a_mesh, programs
from cut.drawn.agreement import assert_all_agree
from cut.mesh import Mesh, Position, variables_of

from keras_ddl.compat.tensorflow import tf

PLAIN = (lines.LINES, more_lines.LINES)
NESTED = (*PLAIN, control_flow.LINES, control_flow.LINES)
QUICK_SHAPES = ((1, 2), (1, 2), (1, 2), (2, 2))
SHAPES = ((1, 2), (2, 2), (3, 2), (1, 4))


def _plain(seed: int, shapes: tuple[Position, ...] = SHAPES, count: int = 5) -> str | None:
    return _disagreement(seed, PLAIN, None if seed % 2 == 0 else (5, 2), shapes, count)


def _nested(seed: int, shapes: tuple[Position, ...] = SHAPES, count: int = 3) -> str | None:
    return _disagreement(seed, NESTED, ((4, 7, 2, 5)[seed // 4 % 4],) if seed % 2 == 0 else (5, 2), shapes, count)


def _disagreement(
    seed: int, kinds: Any, batches: tuple[int, ...] | None, shapes: tuple[Position, ...], count: int
) -> str | None:
    program = programs.draw(seed, kinds, lines=count, batches=batches, weights=on_a_mesh.weights_of(seed))
    return on_a_mesh.disagreement(program, shapes[seed // 2 % len(shapes)])


def test_random_programs_under_random_layouts_equal_one_process() -> None:
    assert_all_agree(lambda seed: _plain(seed, QUICK_SHAPES, 3), range(2))


@pytest.mark.long
def test_nested_programs_under_random_layouts_equal_one_process() -> None:
    assert_all_agree(lambda seed: _nested(seed, QUICK_SHAPES, 2), range(4))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_two_thousand_random_programs_under_random_layouts_equal_one_process(first: int) -> None:
    assert_all_agree(_plain, range(first, first + 100))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_thousand_nested_programs_under_random_layouts_equal_one_process(first: int) -> None:
    assert_all_agree(_nested, range(first, first + 50))


NETWORKS = {**zoo.QUICK, **{name: make for name, make in zoo.LONG.items() if name not in zoo.APPLICATIONS}}
CASES = [(name, seed) for seed in range(3) for name in NETWORKS]


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_networks_under_random_layouts_equal_one_process(name: str, seed: int) -> None:
    keras.utils.set_random_seed(seed)
    shape = SHAPES[seed % 3]
    model, batch = NETWORKS[name]()
    model._symbolic_build(data_batch=batch if isinstance(batch, tuple) else (batch,))
    model.optimizer.build(model.trainable_variables)
    variables = variables_of(model, model.optimizer, *model.metrics)
    rows = [each.astype("float64") if each.dtype == np.float32 else each for each in tf.nest.flatten(batch)]
    layout = on_a_mesh.drawn_layout(variables, shape[1], np.random.default_rng(seed))

    def step(*given: tf.Tensor) -> list[tf.Tensor]:
        return tf.nest.flatten(model.train_step(tf.nest.pack_sequence_as(batch, given)))

    mesh = Mesh(step, rows, shape, variables, layout, along_batch=shape[0] > 1)
    mesh.check(*rows, steps=2, tolerance=1e-9)
