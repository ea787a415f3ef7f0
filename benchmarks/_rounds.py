"""The interleaved rounds with which benchmarks measure, imported from the code of `keras-ddl bench`."""

from keras_ddl.bench.rounds import interleave, machine, slowest_rank

__all__ = ["interleave", "machine", "slowest_rank"]
