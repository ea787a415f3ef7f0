"""Answers requests with a loaded model, in the process of its version."""
