"""Python bindings of the native library: loading, collectives on memory, signals, timelines."""
