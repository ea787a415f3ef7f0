"""Traces a model's inference in training, to a base graph."""
