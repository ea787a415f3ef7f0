"""The job of a Strategy: its ranks as this one sees them, and the settings that it takes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_ddl import communicator, config
from keras_ddl.communicator import history
from keras_ddl.communicator.requests import COMPRESSIONS
from keras_ddl.compat.keras import keras
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import bucket_size
from keras_ddl.strategy.mesh.ranks import Mesh
from keras_ddl.topology import Topology
from keras_ddl.topology.mirrors import mirror_offset


@dataclass(frozen=True)
class Settings:
    """The settings of a Strategy, as this rank passed them. See `Strategy` for each."""

    bucket_bytes: int | str
    sparse_as_dense: bool | str
    drift_check_percent: float
    gather_predictions: str
    batch_statistics: str
    compression: str | None
    shard_optimizer: bool
    min_ranks: int
    layout_map: Any = None
    shard_weights: bool = False
    model_parallel: int = 1
    data_layout: Any = None
    data: str = "all"


@dataclass(eq=False)
class Job:
    """The ranks that share each batch, and how they do it.

    Attributes:
        rank, size: of this process; the number of ranks.
        token: a string that only the ranks of this job share; "" where there is one rank.
        device: what this rank computes with, as tf.device takes it.
        settings: as this rank passed them. The other attributes are equal on all ranks.
        bucket_size: of the gradients that travel in one collective.
        shards_from_elements: slots of so many elements or more are in shards; None: no slots are. shards_weights: so
            are weights, of which a step has `gathered_bytes` gathered at a time.
        drift_check_fraction: of training time, which comparing weights may take.
        goes_on: fit goes on when a rank is lost (survival.py): then `rank` and `size` change.
        reads_on_rank_0: rank 0 alone reads data, and every rank gets its rows (data/from_rank_0.py).
        epoch: how often they have. mirror_offset: where mirrors are of what else only one rank has; 0: there are none.
        mesh: data and model ranks, where a layout cuts variables; None: all ranks are data ranks.
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
    mirror_offset: int = 0
    mesh: Mesh | None = None
    shards_weights: bool = False
    gathered_bytes: int = 0
    reads_on_rank_0: bool = False

    @property
    def slice_mirror_offset(self) -> int:
        """Where mirrors of slices are, along the model axis; 0: there are none, as other data ranks have the same."""
        if not self.goes_on or self.mesh is None or self.mesh.data.size > 1:
            return 0
        return mirror_offset(self.mesh.model.topology.hosts)

    @property
    def accumulates_parts(self) -> bool:
        """Whether ranks may accumulate gradients of their own rows over several steps, and sum them later."""
        return not self.goes_on and self.mesh is None


def agree_on_job(settings: Settings, topology: Topology, device: str) -> Job:
    """Returns the job. COLLECTIVE. Where ranks have passed different settings, rank 0's count."""
    token, percent, reads_on_rank_0 = "", settings.drift_check_percent, settings.data == "rank0"
    weights = settings.shard_weights, config.get("GATHERED_WEIGHT_BYTES")
    shards_from = config.get("SHARD_FROM_ELEMENTS") if settings.shard_optimizer else None
    if topology.size > 1 or history.takes_newcomers():
        of_rank_0 = (secrets.token_hex(8), percent, shards_from, weights, reads_on_rank_0)
        token, percent, shards_from, weights, reads_on_rank_0 = communicator.broadcast_object(
            of_rank_0, name="keras_ddl/job"
        )
    communicator.prepare_plans()
    agreed_size = bucket_size.agree(settings.bucket_bytes)
    job = Job(topology.rank, topology.size, token, device, settings, agreed_size, shards_from, percent / 100)
    job.shards_weights, job.gathered_bytes = weights
    job.reads_on_rank_0 = reads_on_rank_0 and (topology.size > 1 or history.takes_newcomers())
    return job


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


# Setting -> whether a value is allowed, the rule in words, and the default.
_RULES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "bucket_bytes": (
        lambda value: value == bucket_size.AUTO or (isinstance(value, int) and value >= 1),
        "1 or more, or 'auto'",
        "KERAS_DDL_BUCKET_BYTES",
    ),
    "sparse_as_dense": (_one_of(True, False, "auto"), "True, False or 'auto'", "'auto'"),
    "drift_check_percent": (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 100,
        "a number from 0 (never) to 100",
        "KERAS_DDL_DRIFT_CHECK_PERCENT",
    ),
    "gather_predictions": (_one_of("all", "rank0"), "'all' or 'rank0'", "'all'"),
    "batch_statistics": (_one_of("global", "rank"), "'global' or 'rank'", "'global'"),
    "compression": (lambda value: value in COMPRESSIONS, "'bfloat16', 'float16' or None", "None"),
    "shard_optimizer": (lambda value: isinstance(value, bool), "True or False", "False"),
    "shard_weights": (lambda value: isinstance(value, bool), "True or False", "False"),
    "layout_map": (
        lambda value: value is None or isinstance(value, keras.distribution.LayoutMap),
        "a keras.distribution.LayoutMap",
        "variables that every rank has in full",
    ),
    "data_layout": (
        lambda value: value is None or isinstance(value, (tuple, list)),
        "a tuple of axes of the mesh, beside a layout_map",
        "data cut along the batch alone",
    ),
    "model_parallel": (lambda value: type(value) is int and value >= 1, "a number of ranks, 1 or more", "1"),
    "data": (_one_of("all", "rank0"), "'all' or 'rank0'", "'all'"),
    "min_ranks": (lambda value: type(value) is int and value >= 1, "a number of ranks, 1 or more", "1"),
}


# What else a Strategy with a layout_map does not take yet.
_WITH_LAYOUT: dict[str, Any] = {
    "compression": None,
    "shard_weights": False,
    "batch_statistics": "global",
    "gather_predictions": "all",
}
_WITH_CHOICE: dict[str, Any] = {**_WITH_LAYOUT, "shard_optimizer": False}  # of model_parallel


def check_settings(settings: Settings, rank: int) -> None:
    """Raises ConfigError for a setting that is not allowed, or for two that exclude one another."""
    for name, value in vars(settings).items():
        is_allowed, rule, default = _RULES[name]
        if not is_allowed(value):
            raise ConfigError(
                f"Strategy: {name} must be {rule}. Received: {name}={value!r} (rank {rank}). Leave it out for "
                f"{default}."
            )
    if settings.compression is not None and settings.shard_optimizer:
        shards = "shard_weights=True" if settings.shard_weights else "shard_optimizer=True"
        raise ConfigError(
            f"Strategy: compression works on all-reduces only, and {shards} sends gradients by reduce-scatter. "
            f"Received: compression={settings.compression!r} and {shards} (rank {rank}). Leave one of them out."
        )
    if settings.data_layout is not None and settings.layout_map is None:
        raise ConfigError(
            "Strategy: data_layout names axes of a mesh, which a layout_map has. Received: "
            f"data_layout={settings.data_layout!r} without one (rank {rank}). Pass layout_map="
            "keras.distribution.LayoutMap(keras_ddl.device_mesh(...)), which may be empty."
        )
    if settings.layout_map is not None and settings.model_parallel != 1:
        raise ConfigError(
            "Strategy: model_parallel chooses a layout, and layout_map is one. Received: "
            f"model_parallel={settings.model_parallel} and a layout_map (rank {rank}). Leave one of them out."
        )
    has_layout = settings.layout_map is not None or settings.model_parallel != 1
    kind = "a layout_map" if settings.layout_map is not None else "model_parallel"
    alone_with = _WITH_LAYOUT if settings.layout_map is not None else _WITH_CHOICE
    for name, alone in alone_with.items() if has_layout else ():
        value = getattr(settings, name)
        if value != alone:
            raise ConfigError(
                f"Strategy: with {kind}, {name} must be {alone!r}. Received: {name}={value!r} (rank {rank}). "
                "Leave one of them out."
            )
