"""Checks of each host before the programs start."""
