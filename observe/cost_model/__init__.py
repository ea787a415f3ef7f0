"""Predicts the time of an all-reduce (all_reduce.py) and a training step (training_step.py) on links (links.py)."""

from keras_ddl.cost_model.all_reduce import (
    Stage,
    algorithms,
    box,
    choose,
    engine_algorithms,
    halving_doubling,
    mode_for,
    pipelined_box,
    predict,
    recursive_doubling,
    ring,
    ring_stage,
    scattered_ring,
    stages,
)
from keras_ddl.cost_model.links import Cluster, Dimension, shared_memory
from keras_ddl.cost_model.training_step import Step, exchange, expected_largest, fitted_link, fitted_spread, machines

__all__ = [
    "Cluster",
    "Dimension",
    "Stage",
    "Step",
    "algorithms",
    "box",
    "choose",
    "engine_algorithms",
    "exchange",
    "expected_largest",
    "fitted_link",
    "fitted_spread",
    "halving_doubling",
    "machines",
    "mode_for",
    "pipelined_box",
    "predict",
    "recursive_doubling",
    "ring",
    "ring_stage",
    "scattered_ring",
    "shared_memory",
    "stages",
]


def __dir__() -> list[str]:
    return sorted(__all__)
