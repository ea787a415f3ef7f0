"""The job of a Strategy: its ranks and its settings."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_ddl import communicator, config
from keras_ddl.communicator.native.requests import COMPRESSIONS
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat.keras import keras
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import bucket_size
from keras_ddl.state.placements import MeshPlace, place_on_mesh
from keras_ddl.strategy.mesh import ranks
from keras_ddl.strategy.mesh.layout import VariableLayout
from keras_ddl.strategy.mesh.ranks import Mesh
from keras_ddl.topology import Topology


@dataclass(frozen=True)
class Settings:
    """The settings of a Strategy, as this rank passed them. See `Strategy` for each."""

    batch_statistics: str = "global"
    sharding: str | None = None
    layout: Any = None
    data_layout: Any = None
    compression: str | None = None
    reader: str = "all"
    gather_predictions: str = "all"


@dataclass(eq=False)
class Job:
    """The ranks that share each batch, and the settings that they have agreed on.

    Attributes:
        rank: this process's rank.
        size: the number of ranks.
        token: a string that only the ranks of this job share; "" if there is one rank.
        device: this rank's device, as tf.device takes it.
        settings: the settings that this rank passed. The attributes below are equal on all ranks.
        bucket_size: size of the gradients that are sent in one collective.
        shards_from_elements: slots with this many elements or more are in shards; None: no slots are.
        shards_weights: whether weights of that size are in shards, too.
        gathered_bytes: the most bytes of weights that a step keeps gathered at a time.
        drift_check_fraction: fraction of the training time that comparing weights may take.
        goes_on: fit continues when a rank is lost (resilience.py); `rank` and `size` then change.
        reads_on_rank_0: only rank 0 reads data, and every rank gets its rows (data/from_rank_0.py).
        epoch: how often `rank` and `size` have changed.
        hosts: the host of each rank, as in Topology.
        mesh: data and model ranks, if a layout splits variables; None: all ranks are data ranks.
    """

    rank: int
    size: int
    token: str
    device: str
    settings: Settings
    bucket_size: bucket_size.BucketSize
    shards_from_elements: int | None
    drift_check_fraction: float
    goes_on: bool = False
    epoch: int = 0
    hosts: tuple[int, ...] = (0,)
    mesh: Mesh | None = None
    shards_weights: bool = False
    gathered_bytes: int = 0
    reads_on_rank_0: bool = False

    def renew(self, topology: Topology) -> None:
        """Continues with the ranks of `topology`."""
        self.rank, self.size, self.hosts, self.epoch = topology.rank, topology.size, topology.hosts, self.epoch + 1

    def place_of(self, rank: int) -> MeshPlace:
        """Returns the place of a rank among the ranks that share variables."""
        place = place_on_mesh(rank, self.hosts, 1 if self.mesh is None else self.mesh.model.size)
        return place if self.goes_on else MeshPlace(*(each._replace(offset=0) for each in place))

    @property
    def accumulates_parts(self) -> bool:
        """Whether a rank may accumulate gradients of its own rows over several steps before they are summed."""
        return not self.goes_on and self.mesh is None


def agree_on_job(
    settings: Settings, layout: VariableLayout | None, topology: Topology, device: str, goes_on: bool
) -> Job:
    """Returns the job. COLLECTIVE. If ranks have passed different settings, rank 0's are used."""
    is_several = topology.size > 1 or history.takes_newcomers()
    agreed: dict[str, Any] = {
        "token": secrets.token_hex(8) if is_several else "",
        "drift_check_fraction": config.get("DRIFT_CHECK_PERCENT") / 100,
        "shards_from_elements": None if settings.sharding is None else config.get("SHARD_FROM_ELEMENTS"),
        "shards_weights": settings.sharding == "weights",
        "gathered_bytes": config.get("GATHERED_WEIGHT_BYTES"),
        "reads_on_rank_0": settings.reader == "rank0" and is_several,
    }
    if is_several:
        agreed = communicator.broadcast_object(agreed, name="keras_ddl/job")
    communicator.prepare_plans()
    agreed_size = bucket_size.agree()
    mesh = ranks.make(layout, topology) if is_several and layout is not None else None
    return Job(
        rank=topology.rank,
        size=topology.size,
        hosts=topology.hosts,
        device=device,
        settings=settings,
        goes_on=goes_on,
        bucket_size=agreed_size,
        mesh=mesh,
        **agreed,
    )


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


# Setting -> whether a value is allowed, the rule in words, and the default.
_RULES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "batch_statistics": (_one_of("global", "rank"), "'global' or 'rank'", "'global'"),
    "sharding": (_one_of(None, "optimizer", "weights"), "'optimizer', 'weights' or None", "None"),
    "layout": (
        lambda value: (
            value is None or isinstance(value, keras.distribution.LayoutMap) or (type(value) is int and value >= 1)
        ),
        "a keras.distribution.LayoutMap, or a number of model ranks, 1 or more",
        "variables that every rank has in full",
    ),
    "data_layout": (
        lambda value: value is None or isinstance(value, (tuple, list)),
        "a tuple of axes of the mesh, beside a LayoutMap",
        "data cut along the batch alone",
    ),
    "compression": (lambda value: value in COMPRESSIONS, "'bfloat16', 'float16' or None", "None"),
    "reader": (_one_of("all", "rank0"), "'all' or 'rank0'", "'all'"),
    "gather_predictions": (_one_of("all", "rank0"), "'all' or 'rank0'", "'all'"),
}


# The only values that can be combined with a layout so far.
_WITH_LAYOUT: dict[str, tuple[Any, ...]] = {
    "compression": (None,),
    "sharding": (None, "optimizer"),
    "batch_statistics": ("global",),
    "gather_predictions": ("all",),
}
_WITH_CHOICE = {**_WITH_LAYOUT, "sharding": (None,)}  # for a layout that is chosen when a step is traced


def check_settings(settings: Settings, rank: int) -> None:
    """Raises ConfigError for a setting that is not allowed, or for two settings that exclude each other."""
    for name, value in vars(settings).items():
        is_allowed, rule, default = _RULES[name]
        if not is_allowed(value):
            raise ConfigError(
                f"Strategy: {name} must be {rule}. Received: {name}={value!r} (rank {rank}). Leave it out for "
                f"{default}."
            )
    if settings.compression is not None and settings.sharding is not None:
        raise ConfigError(
            "Strategy: compression works with all-reduces only, but sharding sends gradients by reduce-scatter. "
            f"Received: compression={settings.compression!r} and sharding={settings.sharding!r} (rank {rank}). Leave "
            "one of them out."
        )
    is_chosen = isinstance(settings.layout, int)
    if settings.data_layout is not None and (settings.layout is None or is_chosen):
        raise ConfigError(
            "Strategy: data_layout names axes of a device mesh, so it needs a LayoutMap, which has a mesh. "
            f"Received: data_layout={settings.data_layout!r} without a LayoutMap (rank {rank}). Pass "
            "layout=keras.distribution.LayoutMap(keras_ddl.device_mesh(...)), which may be empty."
        )
    if settings.layout in (None, 1):
        return
    what = "a number of model ranks" if is_chosen else "a LayoutMap"
    for name, values in (_WITH_CHOICE if is_chosen else _WITH_LAYOUT).items():
        value = getattr(settings, name)
        if value not in values:
            raise ConfigError(
                f"Strategy: with {what}, {name} must be {' or '.join(map(repr, values))}. Received: {name}={value!r} "
                f"(rank {rank}). Leave one of them out."
            )
