"""`Strategy(layout=N)`: chooses a layout for the variables of a step, and prints it as code for a script."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from keras_ddl.communicator.comparison import require_equal_lists
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.cut import Placement, Program
from keras_ddl.cut.analysis.program import Value
from keras_ddl.cut.axes.layout_search import Unit, choose
from keras_ddl.strategy.mesh.ranks import Mesh
from keras_ddl.strategy.shards.sharded_slots import all_slots
from keras_ddl.strategy.shards.undecided import UndecidedVariable, undecided_of_handle

Axes = tuple[str | None, ...]


def decide(mesh: Mesh, program: Program, placements: Sequence[Placement], step: str, rank: int) -> None:
    """Decides how the mesh holds those variables of a step that are undecided so far. COLLECTIVE.

    program: the step, traced on the global batch.
    placements: the placements of its arguments.
    step: the name of the step in messages.
    """
    values: dict[int, Value] = {}  # by id of the variable
    variables: list[UndecidedVariable] = []
    for value, outer in program.captured:
        variable = undecided_of_handle(outer)
        if variable is not None:
            values[id(variable)] = value
            variables.append(variable)
    if not variables:
        return
    weights = [each for each in variables if each.weight is None]
    units = []
    for each in weights:
        handles = tuple(values[id(v)] for v in (each, *each.slots) if id(v) in values)
        bytes_ = len(handles) * each.shape.num_elements() * each.dtype.size
        units.append(Unit(each.path, tuple(each.shape), bytes_, handles))
    axes = choose(program, units, mesh.model.size, placements)
    keys = written([each.path for each in units], {unit.path: _axes(mesh, unit, axis) for unit, axis in axes.items()})
    require_equal_lists(
        [f"{path}: {axes.get(unit)}" for path, unit in zip((each.path for each in units), units)],
        "keras_ddl/chosen_layout",
        "All ranks must choose the same layout.",
        "Make the model in the same way on every rank.",
        entry="variable",
    )
    for unit, each in zip(units, weights):
        each.decide(axes.get(unit))
    for each in variables:
        if not each.is_decided:  # a slot of a weight that this step only assigns
            each.decide(None)
    for each in all_slots():  # slots of weights that this step does not use
        if isinstance(each, UndecidedVariable) and each.job.mesh is mesh:
            each.complete()
    if rank == 0 and units:
        _show(mesh, step, units, axes, keys)


def _axes(mesh: Mesh, unit: Unit, axis: int) -> Axes:
    return tuple(mesh.layout.model_axis if each == axis else None for each in range(len(unit.shape)))


def _show(mesh: Mesh, step: str, units: Sequence[Unit], axes: Mapping[Unit, int], keys: Mapping[str, Axes]) -> None:
    size, total = mesh.model.size, sum(each.bytes for each in units)
    if not axes:
        stack_position.warn(
            f"layout={size}: no variable of {step} is worth cutting: each cut would move more bytes than it saves, or "
            f"{size} divides none of the extents. Every rank keeps all variables ({total:,} bytes), and the {size} "
            "ranks of a model axis repeat the same computation. Leave layout out, or pass a LayoutMap."
        )
        return
    cut = sum(unit.bytes for unit in axes)
    lines = [
        f"keras_ddl: layout={size} cuts {len(axes)} of {len(units)} variables of {step}, with "
        f"{cut / total:.1%} of {total:,} bytes. To change this layout, define it in the script:",
        "",
        f"mesh = keras_ddl.device_mesh({(mesh.data.size, size)})",
        "layout_map = keras.distribution.LayoutMap(mesh)",
        *(f"layout_map[{_quoted(key)}] = {_written_axes(each)}" for key, each in keys.items()),
        "strategy = keras_ddl.Strategy(layout=layout_map)",
        "",
    ]
    print("\n".join(lines), flush=True)


def _written_axes(axes: Axes) -> str:
    names = ["None" if each is None else f'"{each}"' for each in axes]
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _quoted(key: str) -> str:
    return f'r"{key}"' if "\\" in key else f'"{key}"'


def written(paths: Sequence[str], axes: Mapping[str, Axes]) -> dict[str, Axes]:
    """Returns a layout as few LayoutMap keys: paths, and expressions for paths that differ by a number or a word.

    paths: the paths of all variables.
    axes: the axes of the variables that are cut, by path.
    """
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(re.sub(r"\d+", "#", path), []).append(path)
    keys: dict[str, Axes] = {}
    for alike in kinds.values():
        keys |= _keys_of_kind(alike, axes)
    return _merged(keys)


def _keys_of_kind(paths: Sequence[str], axes: Mapping[str, Axes]) -> dict[str, Axes]:
    """Returns keys for paths that differ only in numbers: an expression for each number that makes no difference."""
    numbers = [re.findall(r"\d+", path) for path in paths]
    places = range(len(numbers[0]))
    for open_ in sorted(itertools.product((True, False), repeat=len(places)), reverse=True, key=sum):
        by_key: dict[str, set[Axes | None]] = {}
        for path, own in zip(paths, numbers):
            parts = re.split(r"\d+", path)
            words = [r"\d+" if is_open else number for is_open, number in zip(open_, own)]
            if len({each[place] for each in numbers for place in places if open_[place]}) < 2:
                words = own  # nothing to leave open
            key = "".join(part for pair in zip(map(re.escape, parts), [*words, ""]) for part in pair)
            by_key.setdefault(key, set()).add(axes.get(path))
        if all(len(of_key) == 1 for of_key in by_key.values()):
            break
    return {key: one for key, (one,) in by_key.items() if one is not None}


def _merged(keys: Mapping[str, Axes]) -> dict[str, Axes]:
    """Returns the keys, merged with (a|b) if they differ in one part of the path."""
    parts = {tuple(key.split("/")): each for key, each in keys.items()}
    longest = max(map(len, parts), default=0)
    for at in range(longest):
        alike: dict[tuple[tuple[str, ...], Axes], list[str]] = {}
        for path, each in parts.items():
            others = (*path[:at], "", *path[at + 1 :]) if at < len(path) - 1 else path
            alike.setdefault((others, each), []).append(path[at] if at < len(path) - 1 else "")
        merged: dict[tuple[str, ...], Axes] = {}
        for (others, each), words in alike.items():
            word = words[0] if len(words) == 1 else f"({'|'.join(words)})"
            merged[(*others[:at], word, *others[at + 1 :]) if others[at : at + 1] == ("",) else others] = each
        parts = merged
    return {"/".join(path): each for path, each in parts.items()}
