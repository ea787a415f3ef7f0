"""Atomic, durable and verified files."""
