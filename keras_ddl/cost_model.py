"""What an all-reduce costs on given links: `keras_ddl.topology.cost_model` under its public name."""

from keras_ddl.topology.cost_model import Cluster, Dimension, algorithms, choose, mode_for, predict, shared_memory

__all__ = ["Cluster", "Dimension", "algorithms", "choose", "mode_for", "predict", "shared_memory"]
