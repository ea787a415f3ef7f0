"""The state of a training: which rank holds which boxes of which array, and how they move."""
