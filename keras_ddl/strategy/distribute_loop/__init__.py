"""What tf.distribute asks of a strategy, and loops of `strategy.run` by its convention. Nothing else needs this."""
