"""How variables begin: who creates them, and their first values."""
