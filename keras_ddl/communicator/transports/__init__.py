"""Connects the ranks of a job by MPI, inside a host or between hosts, and tracks which of them are members."""
