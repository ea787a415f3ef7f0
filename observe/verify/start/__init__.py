"""A directory of PYTHONPATH for programs that are verified: Python runs its sitecustomize.py before anything else."""
