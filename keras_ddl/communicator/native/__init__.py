"""The native library's functions for Python: loading, collectives on memory, signals, timelines."""
