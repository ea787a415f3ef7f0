"""`keras-ddl verify`: proves that a program computes the same on several ranks as in one process, or shows where not.

`runs.py` runs the program as one process and as ranks. In each of these processes `start/` has `recorder.py` follow the
training (strategy/observing.py) and write what it sees (`recording.py`). `compare.py` compares these recordings, which
needs NumPy alone, and `certificate.py` writes the result.
"""
