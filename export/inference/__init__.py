"""Runs a model, or a SavedModel, on rows: its inputs, its sparse and ragged tensors, and the comparison of outputs."""
