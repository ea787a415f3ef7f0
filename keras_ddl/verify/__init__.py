"""`keras-ddl verify`: whether a program gives on several ranks what it gives in one process, and the proof of it.

`runs.py` runs the program as one process and as ranks. In each of these processes `start/` has `recorder.py` follow the
training (strategy/observing.py) and write what it sees (`recording.py`). `compare.py` compares these recordings, which
needs NumPy alone, and `certificate.py` writes what came out.
"""
