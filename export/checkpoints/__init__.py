"""Prepares exports while a training writes checkpoints: base graphs, outputs of the live model, published versions."""
