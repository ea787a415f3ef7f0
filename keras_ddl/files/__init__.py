"""Reads and writes files safely: atomic, durable and verified."""
