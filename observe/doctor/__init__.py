"""keras-ddl doctor: finds problems on a host or between hosts that would stop or slow a training, and the remedies.

`host.py` checks one host without importing TensorFlow. `ranks.py` tries every collective and a tiny training on ranks,
and compares the hosts. Both return `Finding`s.
"""
