"""Optimizers in shards: Strategy(shard_optimizer=True)."""

from pathlib import Path

from harness.rank_tests import rank_tests

FEW = {"KERAS_DDL_SHARD_FROM_ELEMENTS": "2"}  # of small models' weights, all
test_shards = rank_tests(Path(__file__).with_name("shard_checks.py"), [3], env=FEW)
