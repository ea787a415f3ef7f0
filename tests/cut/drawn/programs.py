"""Random small programs, drawn by seed as lines of Python, so that failures can be read and rerun.

A line is accepted if it runs for all batch sizes of the program and can be traced; the shapes of its values decide
which lines may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cut.drawn import functions
from cut.together import specs_of

from keras_ddl.compat.tensorflow import tf

# Names of the arguments: those with rows along axis 0, and those that every rank holds completely.
ROWED = ("x", "u", "y")
WHOLES = ("w", "v", "table")
# Additional weights of programs for a mesh, with extents that the ranks of a model axis divide.
WEIGHTS = {"k": (4, 6), "h": (2, 4, 4), "b": (6,), "e": (6, 2)}
_MOST_ENTRIES = 3000
# SystemError: TensorFlow sometimes raises it when gradients of different shapes are added.
_NOT_A_LINE = (ValueError, TypeError, IndexError, LookupError, NotImplementedError, SystemError, tf.errors.OpError)
SPACE = {"tf": tf, "np": np, **functions.BY_NAME}


def arguments(seed: int, rows: int) -> list[np.ndarray]:
    """Returns x [rows, 3, 4], u [rows, 4] and y [rows] (classes 0 to 3)."""
    rng = np.random.default_rng([seed, rows])
    return [rng.normal(size=(rows, 3, 4)), rng.normal(size=(rows, 4)), rng.integers(0, 4, rows)]


def wholes(seed: int, weights: Sequence[str] = ()) -> list[np.ndarray]:
    """Returns w [4, 5], v [4] and table [4, 3], and some of WEIGHTS."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in ((4, 5), (4,), (4, 3), *map(WEIGHTS.__getitem__, weights))]


@dataclass
class Program:
    """A program whose lines set v0, v1, ...

    Attributes:
        batches: numbers of rows to try; the first is traced.
        static: whether tracing sees the number of rows.
        open_extents: whether tracing sees no other extents of the arguments with rows either.
        weights: names of WEIGHTS, whose values follow those of WHOLES among the arguments.
    """

    seed: int
    static: bool
    batches: tuple[int, ...]
    lines: list[str]
    results: list[str]
    open_extents: bool = False
    weights: tuple[str, ...] = ()

    def __str__(self) -> str:
        known = f"static={self.static}, open_extents={self.open_extents}"
        return "\n".join([f"seed {self.seed}, {known}, batches {self.batches}:", *self.source()])

    def source(self) -> list[str]:
        """Returns the program as lines that compute values, a loss, and its gradients."""
        floats, given = ", ".join(self.results), ", ".join(["x", "u", *WHOLES, *self.weights])
        return [
            "B = tf.shape(x)[0]" if not self.static else "B = x.shape[0]",
            "with tf.GradientTape() as tape:",
            f"    tape.watch([{given}])",
            *(f"    {line}" for line in self.lines),
            f"    loss = sum(tf.reduce_sum(tf.tanh(tf.cast(each, tf.float64)) / 3.0) for each in [{floats}])",
            f"found = tape.gradient(loss, [{given}], unconnected_gradients='zero')",
        ]

    def __call__(self, *given: Any) -> list[Any]:
        space = {**SPACE, **dict(zip((*ROWED, *WHOLES, *self.weights), given))}
        exec("\n".join(self.source()), space)
        values = [space[f"v{i}"] for i in range(len(self.lines))]
        return [*values, space["loss"], *map(tf.convert_to_tensor, space["found"])]

    def types(self) -> set[str] | None:
        """Returns the types of its operations, or None if one process cannot trace it."""
        specs = specs_of(arguments(self.seed, self.batches[0]), self.static, self.open_extents)
        specs += [tf.TensorSpec(each.shape, each.dtype) for each in wholes(self.seed, self.weights)]
        try:
            graph = tf.function(self, autograph=False).get_concrete_function(*specs).graph
        except _NOT_A_LINE:
            return None
        return {each.type for each in graph.get_operations()}


class Drawing:
    """A program while it is drawn, with its values for each number of rows."""

    def __init__(self, seed: int, static: bool, batches: Sequence[int], weights: Sequence[str] = ()) -> None:
        self.rng = np.random.default_rng(seed)
        self.spaces = []
        for rows in batches:
            given = map(tf.constant, [*arguments(seed, rows), *wholes(seed, weights)])
            self.spaces.append({**SPACE, "B": rows, **dict(zip((*ROWED, *WHOLES, *weights), given))})
        self.lines: list[str] = []
        self.names = [*ROWED, "w", "v", *weights, *weights]

    def take(self, expression: str) -> bool:
        """Adds a line if it runs and its numbers are of moderate size."""
        name = f"v{len(self.lines)}"
        found = []
        for space in self.spaces:
            try:
                value = eval(expression, space)
            except _NOT_A_LINE:
                return False
            if not isinstance(value, tf.Tensor) or tf.size(value) > _MOST_ENTRIES or value.dtype == tf.float32:
                return False
            if value.dtype.is_floating and np.max(np.abs(np.nan_to_num(value, posinf=1e9)), initial=0) > 1e6:
                return False
            found.append(value)
        if len({len(value.shape) for value in found}) != 1:
            return False
        for space, value in zip(self.spaces, found):
            space[name] = value
        self.lines.append(f"{name} = {expression}")
        self.names += [name, name, name]  # makes new values more likely operands
        return True

    def shape(self, name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(space[name].shape) for space in self.spaces)

    def rank(self, name: str) -> int:
        return len(self.spaces[0][name].shape)

    def pick(self, kind: str = "f", ranks: Sequence[int] = (0, 1, 2, 3, 4), like: str | None = None) -> str:
        """Returns the name of a random tensor of floats (f), integers (i) or truth values (b).

        Raises: LookupError: no value fits.
        """
        fitting = []
        for name in self.names:
            dtype = self.spaces[0][name].dtype
            is_kind = {"f": dtype.is_floating, "i": dtype.is_integer, "b": dtype == tf.bool}[kind]
            if is_kind and self.rank(name) in ranks and (like is None or self.shape(name) == self.shape(like)):
                fitting.append(name)
        if not fitting:
            raise LookupError(kind)
        return str(self.rng.choice(fitting))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def number(self) -> float:
        return round(float(self.rng.normal()), 2)

    def axis(self, name: str, more: int = 0) -> int:
        rank = self.rank(name) + more
        return int(self.rng.integers(-rank, rank))

    def axes(self, name: str) -> list[int]:
        rank = self.rank(name)
        return sorted(int(each) for each in self.rng.choice(rank, self.rng.integers(1, rank + 1), replace=False))


def draw(
    seed: int,
    kinds: Sequence[Sequence[Callable[[Drawing], str]]],
    *,
    lines: int = 6,
    batches: tuple[int, ...] | None = None,
    open_extents: bool = False,
    weights: tuple[str, ...] = (),
) -> Program:
    """Draws the program of a seed. Programs of even seeds are static: they are traced for one number of rows.

    kinds: lists of functions that draw a line; every list is used equally often.
    """
    static = seed % 2 == 0
    batches = batches or (((4, 5, 3, 1, 6, 2, 7)[seed // 2 % 7],) if static else (5, 1, 2, 7))
    drawing = Drawing(seed, static, batches, weights)
    for _ in range(40 * lines):
        if len(drawing.lines) == lines:
            break
        try:
            drawing.take(drawing.one_of(*drawing.one_of(*kinds))(drawing))
        except LookupError:
            continue
    results = [f"v{i}" for i in range(len(drawing.lines)) if drawing.spaces[0][f"v{i}"].dtype.is_floating]
    return Program(seed, static, batches, drawing.lines, results or ["u"], open_extents, weights)
