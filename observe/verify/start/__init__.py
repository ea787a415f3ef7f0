"""A directory of PYTHONPATH for verified programs: Python runs its sitecustomize.py before anything else."""
