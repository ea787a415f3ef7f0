"""Traces a model's inference function to a base graph during training."""
