"""Writes what exports need while a Checkpoint trains: base graphs, answers of ranks, published versions."""
