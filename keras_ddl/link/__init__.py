"""The connections between the processes of a job: typed frames, one handshake, one table of kinds (kinds.py)."""
