"""Lets `get_weights` return only this rank's part of a weight that is spread over ranks, for `set_weights`.

Callbacks keep the best weights of a training, or an average, and set them later. If all ranks do so, each keeps its
part, so no rank ever needs memory for a complete weight. A part can be copied, used in entry-by-entry arithmetic, and
set again. To see its numbers, read them inside `with strategy.whole_model(model):`, where `get_weights` returns
complete arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.state.exchange import gather
from keras_ddl.state.placements import holding
from keras_ddl.state.plan import Holding
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, Share, sharded_variable, slot_of

_calls = itertools.count()


class KeptWeight(np.lib.mixins.NDArrayOperatorsMixin):
    """This rank's part of the values that a weight had, and the mirror of another rank's part if there is one.

    Attributes:
        shape, dtype: the shape and dtype of the complete weight.
        share: how the weight was distributed at that time, without the variables.
        parts: the entries that this rank's variables had.
        number: number of the call of get_weights, equal on all ranks that make the same calls.
    Raises: ConfigError, when the part is read as an array.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], share: Share, parts: Sequence[np.ndarray], number: int
    ) -> None:
        self.name, self.shape, self.parts, self.number = name, shape, list(parts), number
        self.share = replace(share, chunk=None, mirror=None)  # frees their memory

    def held(self) -> Holding:
        """Returns which boxes this rank has kept."""
        return holding(self.share.layout, self.share.place)

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.parts[0].dtype
        return dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def copy(self) -> KeptWeight:
        return self._with([each.copy() for each in self.parts])

    def __deepcopy__(self, memo: Any) -> KeptWeight:
        return self.copy()

    def astype(self, dtype: Any) -> KeptWeight:
        return self._with([each.astype(dtype) for each in self.parts])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Computes entry by entry with numbers and with other parts that are distributed in the same way."""
        for each in inputs:
            is_part = isinstance(each, KeptWeight) and each.shape == self.shape and _are_alike(each.share, self.share)
            if not is_part and (isinstance(each, KeptWeight) or np.ndim(each)):
                raise self._refusal(f"{ufunc.__name__} of a part and a {type(each).__name__}")
        if method != "__call__" or ufunc.signature is not None or ufunc.nout != 1 or options:
            raise self._refusal(f"{ufunc.__name__}.{method}")
        computed = [
            ufunc(*(each.parts[place] if isinstance(each, KeptWeight) else each for each in inputs))
            for place in range(len(self.parts))
        ]
        if out is None:
            return self._with(computed)
        out[0].parts = [new.astype(old.dtype) for new, old in zip(computed, out[0].parts)]
        return out[0]

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise self._refusal("an array made of it")

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<KeptWeight of {self.name!r} shape={self.shape} dtype={self.dtype}, a part on each rank>"

    def set(self, variable: Any) -> None:
        """Gives these values to a Keras variable. Call it on all ranks.

        Raises: ConfigError: the variable is not spread over the ranks as the weight was.
        """
        slot = sharded_variable(variable)
        if slot is None or not _are_alike(slot.share, self.share):
            is_lost = slot_of(variable) is not None
            raise ConfigError(
                "set_weights takes parts from get_weights only for a weight that is still spread over the ranks in the "
                f"same way. Received: {self.name} of {self.share.layout.size} ranks, for {variable.path}, "
                f"{'which is now spread in another way' if is_lost else 'which every rank holds in full'} (rank "
                f"{communicator.rank()}). "
                + (
                    "Call get_weights again after a rank was lost or has joined, or resume from a checkpoint."
                    if is_lost
                    else "Make the model that receives the weights inside `with strategy.scope():`, too."
                )
            )
        for mine, part in zip(slot.share.variables, self.parts):
            mine.assign(tf.constant(part, slot.dtype))
        slot.note_assignment(np.array([self.number]))
        gathered_slots.gather_again(slot)

    def _with(self, parts: Sequence[np.ndarray]) -> KeptWeight:
        return KeptWeight(self.name, self.shape, self.share, parts, self.number)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            "For a weight that is spread over the ranks, get_weights returns this rank's part. It can only be passed "
            f"to set_weights and used in entry-by-entry arithmetic. Received: {what} ({self.name}, rank "
            f"{communicator.rank()}). To read the whole weight, call get_weights inside `with "
            "strategy.whole_model(model):`, on all ranks."
        )


def get_weights(original: Callable[..., list[Any]], layer: Any) -> list[Any]:
    """Returns arrays, or a KeptWeight for each weight that is spread over ranks and not gathered on all of them."""
    slots = [sharded_variable(each) for each in layer.weights]
    if gathered_slots.are_readable_everywhere(slot for slot in slots if slot is not None):
        return original(layer)
    number = next(_calls)
    return [each.numpy() if slot is None else _kept(slot, number) for each, slot in zip(layer.weights, slots)]


def set_weights(original: Callable[..., None], layer: Any, weights: Sequence[Any]) -> None:
    """Sets arrays, or what `get_weights` returned."""
    if not any(isinstance(each, KeptWeight) for each in weights):
        original(layer, weights)
        return
    shapes = [[tuple(each.shape) for each in some] for some in (layer.weights, weights)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"set_weights needs one value for each weight of layer {layer.name!r}, of the same shape: {shapes[0]}. "
            f"Received: {shapes[1]}."
        )
    for variable, value in zip(layer.weights, weights):
        if isinstance(value, KeptWeight):
            value.set(variable)
        else:
            variable.assign(value)


def _kept(slot: ShardedVariable, number: int) -> KeptWeight:
    share, shape = slot.share, tuple(slot.shape.as_list())
    # Copies, so that the result neither keeps a step's buffers alive nor changes with them.
    return KeptWeight(slot.name, shape, share, [np.array(each.numpy()) for each in share.variables], number)


def _are_alike(one: Share, other: Share) -> bool:
    """Whether two variables are distributed in the same way."""
    return all(getattr(one, each) == getattr(other, each) for each in ("layout", "place", "generation"))


def part_of(variable: Any, value: np.ndarray) -> Any:
    """Returns this rank's part of an array, as `get_weights` would for the variable. Call it on all ranks.

    If each rank has the complete variable, returns the array.
    """
    slot = sharded_variable(variable)
    if slot is None:
        return value
    parts = [np.array(slot.layout.cut(value, part)) for part in slot.share.place.parts()]
    return KeptWeight(slot.name, tuple(value.shape), slot.share, parts, next(_calls))


def complete(kept: KeptWeight, held: Sequence[Holding], name: str) -> np.ndarray | None:
    """Assembles a kept weight on rank 0 from the ranks' parts; returns None on other ranks. COLLECTIVE.

    Args:
        held: what each rank holds.
        name: the name of the collective.
    Raises: MissingBoxError: a part was lost with a rank.
    """
    place = communicator.topology()
    return gather(tuple(held), kept.shape, place.hosts, place.rank, lambda: kept.parts, kept.dtype, name, on_rank=0)
