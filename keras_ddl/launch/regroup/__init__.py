"""Jobs that continue without lost ranks, and take new ones."""
