"""Imports the interleaved rounds of `keras-ddl bench`, which the benchmarks use."""

from keras_ddl.bench.rounds import interleave, machine, slowest_rank

__all__ = ["interleave", "machine", "slowest_rank"]
