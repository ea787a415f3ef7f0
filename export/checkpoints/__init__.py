"""What a Checkpoint writes for exports while it trains: base graphs, answers of ranks, published versions."""
