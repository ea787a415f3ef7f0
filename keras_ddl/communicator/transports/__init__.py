"""How the ranks of a job reach one another: by MPI, in a host, between hosts; and which of them are members."""
