"""A mesh of data and model ranks, `Strategy(layout=...)`, with Keras's DeviceMesh, LayoutMap and TensorLayout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat.keras import keras
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.mesh.layout import VariableLayout
from keras_ddl.topology import Topology


def device_mesh(shape: Sequence[int], axis_names: Sequence[str] = ("batch", "model")) -> Any:
    """Returns a keras.distribution.DeviceMesh whose devices are the ranks of the job.

        mesh = keras_ddl.device_mesh((2, 2))
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*dense.*kernel"] = (None, "model")
        strategy = keras_ddl.Strategy(layout=layout_map)

    Calls `keras_ddl.init` if the program has not. The last axis consists of consecutive ranks, which launchers place on
    one host: make it the model axis.

    Args:
        shape: the extent of each axis; their product is the number of ranks.
        axis_names: names of the axes. The first axis shares out the batch, as in keras.distribution.ModelParallel.
    Raises: ConfigError: the product is not the number of ranks, or the numbers of names and extents differ.
    """
    topology = communicator.init()
    shape, axis_names = tuple(shape), tuple(axis_names)
    if len(shape) != len(axis_names) or math.prod(shape) != topology.size:
        raise ConfigError(
            "device_mesh: the product of the extents must equal the number of ranks, and every axis needs a name. "
            f"Received: shape={shape!r}, axis_names={axis_names!r} with {topology.size} ranks (rank {topology.rank}). "
            f"Start {math.prod(shape)} ranks, or choose another shape."
        )
    return keras.distribution.DeviceMesh(shape, axis_names, devices=[f"rank:{each}" for each in range(topology.size)])


def layout_of(layout: Any, data_layout: Sequence[str | None] | None, topology: Topology) -> VariableLayout | None:
    """Returns the layout that `Strategy(layout=...)` asks for; None: every rank has all variables.

    Args:
        layout: a LayoutMap; a number of model ranks, whose layout is chosen later; or None.
    Raises: ConfigError: that number does not divide the number of ranks.
    """
    if layout is None or (isinstance(layout, int) and 1 in (layout, topology.size)):
        return None
    if not isinstance(layout, int):
        return VariableLayout(layout, topology.size, topology.rank, data_layout=data_layout)
    if topology.size % layout:
        raise ConfigError(
            f"Strategy: the number of model ranks must divide the number of ranks ({topology.size}). Received: "
            f"layout={layout} (rank {topology.rank}). Start a multiple of {layout} ranks, or choose a divisor."
        )
    mesh = device_mesh((topology.size // layout, layout))
    return VariableLayout(keras.distribution.LayoutMap(mesh), topology.size, topology.rank, is_to_choose=True)
