"""The processes that start the ranks' wrappers on their hosts."""
