"""Checks whether a server can load a SavedModel, and whether it answers as the trained model did."""
