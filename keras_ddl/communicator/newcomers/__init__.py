"""A record of results and a board, which let a rank catch up with a running job."""
