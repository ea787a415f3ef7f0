"""The interface that tf.distribute requires of a strategy, and loops of `strategy.run` by its convention."""
