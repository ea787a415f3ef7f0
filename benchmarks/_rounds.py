"""Interleaved rounds: how every benchmark here measures. The code is that of `keras-ddl bench`."""

from keras_ddl.bench.rounds import interleave, machine, slowest_rank

__all__ = ["interleave", "machine", "slowest_rank"]
