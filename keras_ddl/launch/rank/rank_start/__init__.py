"""A directory of PYTHONPATH for the program of a rank: Python runs its sitecustomize.py before anything else."""
