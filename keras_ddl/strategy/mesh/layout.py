"""Reads a keras.distribution.LayoutMap, which says which axis of which variable the model axis cuts."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_ddl import cut
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

_NAMED = 4  # number of names in a message


class DataLayout:
    """Names, for each axis of arguments with rows, the mesh axis that cuts it, or None.

    Attributes: axis: the axis of arguments that the model axis cuts.
    Raises: ConfigError: it does not begin with the batch axis, or does not name the model axis exactly once.
    """

    def __init__(self, axes: Sequence[str | None], batch_axis: str, model_axis: str | None, rank: int) -> None:
        self._axes, self._rank = tuple(axes), rank
        self._warned: set[str] = set()  # names of steps already warned about
        rest = [each for each in self._axes[1:] if each is not None]
        if self._axes[:1] != (batch_axis,) or model_axis is None or rest != [model_axis]:
            raise ConfigError(
                f"data_layout must begin with the mesh's batch axis {batch_axis!r}, name its model axis "
                f"{model_axis!r} once, and have None for all other axes of the data. Received: "
                f"data_layout={self._axes!r} (rank {rank}). For sequences [batch, positions, ...] write "
                f"({batch_axis!r}, {model_axis or 'model'!r})."
            )
        self.axis = self._axes.index(model_axis)

    def describe(self) -> str:
        return f"data_layout {self._axes}"

    def axes_of_arguments(
        self, values: Sequence[tf.Tensor], placements: Sequence[cut.Placement], model_size: int, step: str
    ) -> list[int | None]:
        """Returns, for each argument of a step, the axis along which model ranks cut it, or None.

        Rank 0 warns, once for each step, if no argument is cut.
        """
        axes = [
            self.axis if isinstance(placement, cut.Sharded) and self._divides(value.shape, model_size) else None
            for value, placement in zip(values, placements)
        ]
        if not any(axes) and self._rank == 0 and step not in self._warned:
            self._warned.add(step)
            shapes = ", ".join(str(each.shape) for each in values)
            stack_position.warn(
                f"data_layout cuts an argument along axis {self.axis} only if the extent of that axis is known when "
                f"the step is traced and is a multiple of {model_size}, the number of model ranks. Received: {step}, "
                f"where no argument qualifies: shapes {shapes}. Every model rank gets all of the data. Give data "
                "with such an extent, or leave out data_layout."
            )
        return axes

    def _divides(self, shape: tf.TensorShape, model_size: int) -> bool:
        if shape.rank is None or shape.rank <= self.axis:
            return False
        extent: Any = shape.as_list()[self.axis]
        return bool(extent) and extent % model_size == 0


class VariableLayout:
    """A layout of variables over a mesh with a batch axis and a model axis.

    Keys are looked up as the installed version of Keras does: a key that is the path of the variable, else a regular
    expression that matches the path, at most one.

    Args:
        layout_map: a keras.distribution.LayoutMap.
        size, rank: the job's size and this rank, for checks and messages.
        is_to_choose: the layout_map is empty, and shards/layout_choice.py chooses the axis along which each new
            variable is cut.
        data_layout: as in Strategy, or None.
    Attributes:
        data: the arguments that are also cut; None: no argument.
        data_size, model_size: the extents of the axes.
        model_axis: the name of the second axis; None: there is only one.
    Raises: ConfigError: the mesh does not fit this job.
    """

    def __init__(
        self,
        layout_map: Any,
        size: int,
        rank: int,
        *,
        is_to_choose: bool = False,
        data_layout: Sequence[str | None] | None = None,
    ) -> None:
        self._map, self._rank, self.is_to_choose = layout_map, rank, is_to_choose
        mesh = layout_map.device_mesh
        if not isinstance(mesh, keras.distribution.DeviceMesh):
            raise self._error("a LayoutMap needs a DeviceMesh", f"device_mesh={mesh!r}", "Use keras_ddl.device_mesh.")
        names, shape = tuple(mesh.axis_names), tuple(mesh.shape)
        if math.prod(shape) != size:
            raise self._error(
                f"the mesh must have as many devices as there are ranks ({size})",
                f"shape={shape!r}, {math.prod(shape)} devices",
                "Make the mesh with keras_ddl.device_mesh, or start another number of ranks.",
            )
        if len(names) > 2:
            raise self._error(
                "a mesh has two axes: the first shares out the batch, the second cuts variables",
                f"axis_names={names!r}",
                "Leave out all but two of the axes.",
            )
        self._check_devices(mesh)
        self._batch_axis, self.data_size = names[0], int(shape[0])
        self.model_axis: str | None = names[1] if len(names) > 1 else None
        self.model_size = int(shape[1]) if len(names) > 1 else 1
        self.data = None if data_layout is None else DataLayout(data_layout, names[0], self.model_axis, rank)
        self._check_axes(names)
        self._unmatched = list(layout_map)
        self._paths: list[str] = []  # the first paths that were looked up, for messages
        self._is_resized = False

    @property
    def has_keys(self) -> bool:
        return bool(len(self._map))

    @property
    def wanted_model_size(self) -> int:
        """The extent of the model axis that the program asked for, which the current mesh may not have."""
        return int(self._map.device_mesh.shape[1]) if self.model_axis else 1

    def resized(self, data_size: int, model_size: int, rank: int) -> VariableLayout:
        """Returns this layout over another mesh, after ranks were lost or have joined. `rank`: this process's new rank.

        A new variable is replicated, with a warning, if the number of model ranks does not divide its extent.
        """
        layout = copy.copy(self)
        layout.data_size, layout.model_size, layout._rank = data_size, model_size, rank
        layout._is_resized = model_size != self.wanted_model_size
        return layout

    def position(self, rank: int) -> str:
        """Returns the position of a rank on the mesh, for messages."""
        data, model = divmod(rank, self.model_size)
        return f"{self._batch_axis} {data}" + (f", {self.model_axis} {model}" if self.model_axis else "")

    def _check_devices(self, mesh: Any) -> None:
        devices = [str(each) for each in np.ravel(mesh.devices)]
        expected = [f"rank:{each}" for each in range(len(devices))]
        if devices != expected:
            raise self._error(
                f"the devices of a mesh are the ranks of the job in their order, {_first(expected)}",
                f"devices={_first(devices)}",
                "Make the mesh with keras_ddl.device_mesh, which names them.",
            )

    def _check_axes(self, names: Sequence[str]) -> None:
        """Checks the axes of the mesh that layouts of variables name. Raises: ConfigError."""
        axes_of_variables = {key: tuple(layout.axes) for key, layout in self._map.items() if not _names_output(key)}
        for key, axes in axes_of_variables.items():
            named = [each for each in axes if each is not None]
            unknown = [each for each in named if each not in names]
            if unknown:  # a TensorLayout with its own mesh; Keras checks others
                raise self._error(
                    f"a layout names axes of the mesh, {', '.join(map(repr, names))}, or None",
                    f"{axes!r} for {key!r}, with unknown axes {unknown}",
                    "Name axes of the LayoutMap's device_mesh.",
                )
            if len(set(named)) < len(named):
                raise self._error(
                    "each axis of the mesh may cut only one axis of a variable",
                    f"{axes!r} for {key!r}",
                    "Replace all but one by None.",
                )
        is_used = any(self.model_axis in axes for axes in axes_of_variables.values())
        if self.model_size > 1 and axes_of_variables and not is_used and self.data is None:
            raise self._error(
                f"the second axis of the mesh, here {self.model_axis!r} of {self.model_size} ranks, cuts variables; "
                f"the first, {self._batch_axis!r}, shares out the batch",
                f"no key that names {self.model_axis!r}",
                "Name it for at least one variable, or swap the axes of the mesh.",
            )

    def axis_of(self, path: str, shape: Sequence[int | None]) -> int | None:
        """Returns the axis of a variable that is cut along the model axis; None: every rank has the complete variable.

        Raises: ConfigError: several keys match, the layout has another number of axes, or the model ranks do not divide
            the extent.
        """
        try:
            layout = self._map[path]
        except ValueError as error:
            raise self._error(
                "at most one key may match the path of a variable", str(error), "Make the keys more precise."
            ) from error
        self._unmatched = [key for key in self._unmatched if not self._has(key, path)]
        self._paths += [path] if len(self._paths) < _NAMED + 1 else []
        if layout is None:
            return None
        axes = tuple(layout.axes)
        if len(axes) != len(shape):
            raise self._error(
                "a layout names the axis of the mesh, or None, for each axis of the variable",
                f"{axes!r} for {path!r} of shape {tuple(shape)}",
                "Write one entry for each axis of the variable.",
            )
        if self.model_axis not in axes or self.model_size == 1:
            return None
        axis = axes.index(self.model_axis)
        extent = shape[axis]
        if self._is_resized and extent and extent % self.model_size:
            if self._rank == 0:
                stack_position.warn(
                    f"layout: every rank keeps all of {path!r}, of shape {tuple(shape)}: the {self.model_size} "
                    f"model ranks that are left do not divide its extent {extent}."
                )
            return None
        if not extent or extent % self.model_size:
            raise self._error(
                f"the number of model ranks, {self.model_size}, must divide the extent of the axis that it cuts",
                f"{axes!r} for {path!r} of shape {tuple(shape)}, with extent {extent}",
                "Choose another extent, cut another axis, or leave this variable out.",
            )
        return axis

    def check_effects(self) -> None:
        """Warns once, on rank 0, about keys that have matched no variable so far.

        Raises: ConfigError: no key has matched.
        """
        unmatched = [key for key in self._unmatched if not _names_output(key)]
        output_keys = [key for key in self._unmatched if _names_output(key)]
        if self._unmatched and len(self._unmatched) == len(self._map):
            raise self._error(
                "keys must match the paths of variables that are made under strategy.scope()",
                f"{self._unmatched}, which match no path{f' of {_first(self._paths)}' if self._paths else ''}",
                "If the paths begin with the name of the model, begin the keys with '.*'. To see the paths: `for each "
                "in model.variables: print(each.path)`.",
            )
        if unmatched and self._rank == 0:
            stack_position.warn(f"layout: these keys match no variable, and have no effect: {unmatched}.")
        if output_keys and self._rank == 0:
            stack_position.warn(
                "layout: keys for outputs of layers have no effect, because the layout of variables determines "
                f"them. Received: {output_keys}. Leave them out."
            )
        self._unmatched = []

    def along_batch(self) -> list[str]:
        """Returns the keys that also name the batch axis, along which variables are not cut."""
        along = [key for key, layout in self._map.items() if self._batch_axis in layout.axes]
        return [key for key in along if not _names_output(key)]

    def _has(self, key: str, path: str) -> bool:
        alone = keras.distribution.LayoutMap(None)
        alone[key] = ()
        return key == path or alone[path] is not None

    def describe(self) -> list[str]:
        """Returns the text that must be equal on all ranks: the mesh, and each key with its layout."""
        mesh = f"mesh {self.data_size} x {self.model_size}, axes {self._batch_axis}, {self.model_axis}"
        keys = [f"{key}: {tuple(layout.axes)}" for key, layout in self._map.items()]
        return [mesh, *keys, *([] if self.data is None else [self.data.describe()])]

    def refuse_made_outside(self, path: str, shape: Sequence[int | None]) -> None:
        """Raises ConfigError if a key matches a variable made outside of the scope, which cannot be cut."""
        if self.axis_of(path, shape) is not None:
            raise self._error(
                "a variable that a key cuts must be made under the scope of the Strategy",
                f"{path!r} of shape {tuple(shape)}, which was made outside the scope",
                "Make the layer inside `with strategy.scope():`; if the layer makes its variables in its first call, "
                "make that call there, too.",
            )

    def _error(self, rule: str, received: str, remedy: str) -> ConfigError:
        return ConfigError(f"layout: {rule}. Received: {received} (rank {self._rank}). {remedy}")


def _names_output(key: str) -> bool:
    """Whether a key names a layer's output, as in Keras: the layer's path and "/output"."""
    return key.endswith("/output")


def _first(names: Sequence[str]) -> str:
    """Returns the first few names, for a message."""
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
