"""Checks rules about the sources that ruff and mypy lack; `make lint` runs it.

    PYTHONPATH=tools python -m structure    # prints "file:line: rule" for every violation

A rule is a function that takes a Project and yields Findings; its docstring is the rule. tests/unit/test_structure.py
feeds each rule a file that breaks it.
"""
