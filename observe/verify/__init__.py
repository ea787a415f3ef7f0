"""`keras-ddl verify`: proves that a program computes the same on several ranks as in one process, or shows differences.

`runs.py` runs the program as one process and as ranks. In each process, `start/` makes `recorder.py` observe the
training (strategy/observing.py) and write its values (`recording.py`). `compare.py` compares the recordings, for which
it needs only NumPy, and `certificate.py` writes the result.
"""
