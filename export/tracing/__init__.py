"""In training: a model's inference becomes a base graph."""
