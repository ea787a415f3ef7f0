"""Starts, limits and ends the processes of model versions."""
