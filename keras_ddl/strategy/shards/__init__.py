"""Splits variables into one part per rank: Strategy(sharding="optimizer" or "weights")."""
