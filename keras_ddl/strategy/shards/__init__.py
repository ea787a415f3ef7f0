"""Variables of which each rank has a part: Strategy(sharding="optimizer" or "weights")."""
