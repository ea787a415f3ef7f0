"""Which arguments of a step are cut along the model axis as well: Strategy(data_layout=...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl import cut
from keras_ddl.communicator import stack_position
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError


class DataLayout:
    """Names, for each axis of the arguments that have rows, the axis of the mesh along which it is cut, or None.

    Attributes: axis: of arguments, that the model axis cuts.
    Raises: ConfigError: it does not begin with the batch axis, or does not name the model axis once.
    """

    def __init__(self, axes: Sequence[str | None], batch_axis: str, model_axis: str | None, rank: int) -> None:
        self._axes, self._rank = tuple(axes), rank
        self._warned: set[str] = set()  # names of steps
        rest = [each for each in self._axes[1:] if each is not None]
        if self._axes[:1] != (batch_axis,) or model_axis is None or rest != [model_axis]:
            raise ConfigError(
                f"data_layout: it begins with the axis of the mesh that shares out the batch, {batch_axis!r}, and "
                f"names the other, {model_axis!r}, for one axis of the data, and None for the rest. Received: "
                f"data_layout={self._axes!r} (rank {rank}). Of sequences [batch, positions, ...] it is "
                f"({batch_axis!r}, {model_axis or 'model'!r})."
            )
        self.axis = self._axes.index(model_axis)

    def describe(self) -> str:
        """Returns what must be equal on all ranks."""
        return f"data_layout {self._axes}"

    def of_arguments(
        self, values: Sequence[tf.Tensor], placements: Sequence[cut.Placement], model_size: int, step: str
    ) -> list[int | None]:
        """Returns for each argument of a step the axis along which model ranks cut it, or None. Warns, on rank 0 and
        once for each step, if there is none.
        """
        axes = [
            self.axis if isinstance(placement, cut.Sharded) and self._divides(value.shape, model_size) else None
            for value, placement in zip(values, placements)
        ]
        if not any(axes) and self._rank == 0 and step not in self._warned:
            self._warned.add(step)
            shapes = ", ".join(str(each.shape) for each in values)
            stack_position.warn(
                f"data_layout: an argument is cut along its axis {self.axis} if its extent is known when a step is "
                f"traced, and a multiple of {model_size} ranks. No argument of {step} is: {shapes}."
            )
        return axes

    def _divides(self, shape: tf.TensorShape, model_size: int) -> bool:
        if shape.rank is None or shape.rank <= self.axis:
            return False
        extent: Any = shape.as_list()[self.axis]
        return bool(extent) and extent % model_size == 0
