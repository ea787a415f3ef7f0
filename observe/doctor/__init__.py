"""keras-ddl doctor: finds what on a host, or between hosts, would stop a training or slow it down, and the remedies.

`host.py` checks one host without importing TensorFlow. `ranks.py` tries every collective and a tiny training on ranks,
and compares the hosts. Both return `Finding`s.
"""
