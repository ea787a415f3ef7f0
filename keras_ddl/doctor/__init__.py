"""keras-ddl doctor: what on a host, or between hosts, will stop a training or slow it down, and what to do about it.

`host.py` looks at one host without importing TensorFlow, `ranks.py` tries every collective and a tiny training on ranks
and compares the hosts; both return `Finding`s.
"""
