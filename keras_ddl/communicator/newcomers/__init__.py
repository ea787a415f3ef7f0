"""What lets a rank catch up with a job that runs: a record of results, and a board."""
