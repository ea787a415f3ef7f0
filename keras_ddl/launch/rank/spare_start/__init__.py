"""A directory of PYTHONPATH for the program of a spare: Python runs its sitecustomize.py before anything else."""
