"""Horovod's Keras interface (horovod.tensorflow.keras): `import keras_ddl.horovod.keras as hvd`.

Other names are those of keras_ddl.horovod.
"""

from __future__ import annotations

from typing import Any

from keras_ddl import horovod
from keras_ddl.horovod import callbacks
from keras_ddl.horovod import keras_elastic as elastic
from keras_ddl.horovod.collectives import broadcast_global_variables
from keras_ddl.horovod.keras_collectives import allgather, allreduce, broadcast, reducescatter
from keras_ddl.horovod.model_loading import load_model
from keras_ddl.horovod.optimizer import DistributedOptimizer, PartialDistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]


def __getattr__(name: str) -> Any:
    return getattr(horovod, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(horovod)})
