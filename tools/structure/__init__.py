"""Rules about the sources that ruff and mypy do not know; `make lint` checks them.

    PYTHONPATH=tools python -m structure    # prints file:line: rule for every line that breaks one

A rule is a function that takes a Project and yields Findings; its docstring is the rule. tests/unit/test_structure.py
feeds each rule a file that breaks it.
"""
