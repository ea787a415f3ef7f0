"""Starts the ranks' wrappers on their hosts."""
