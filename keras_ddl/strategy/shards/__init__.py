"""What optimizers keep for large weights, in shards: Strategy(shard_optimizer=True)."""
