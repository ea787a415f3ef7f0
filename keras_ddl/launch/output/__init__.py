"""The ranks' output, and what of it a user sees."""
