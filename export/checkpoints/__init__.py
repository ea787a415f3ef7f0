"""Prepares exports while training writes checkpoints: base graphs, outputs of the live model, published versions."""
