"""IBM's DDL: how its scripts and options are read."""
