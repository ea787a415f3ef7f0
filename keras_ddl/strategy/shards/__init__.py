"""Variables of which each rank has a part: Strategy(shard_optimizer=True), and shard_weights=True."""
