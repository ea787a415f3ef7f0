"""The modules of benchmarks/scoreboard.py: programs, peers that run them, and the judge of their results."""
