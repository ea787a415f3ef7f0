"""What benchmarks/scoreboard.py consists of: programs, peers that run them, and the judge of what they leave."""
