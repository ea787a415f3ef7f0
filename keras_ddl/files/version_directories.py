"""Recognizes the version directories of a model, which an export writes and a server loads."""

from __future__ import annotations

LARGEST = 2**63 - 1  # TensorFlow Serving keeps a version as an int64


def number_of(name: str) -> int | None:
    """Returns the version that a directory's name denotes; None if it is not a version.

    As in TensorFlow Serving, a version is a number from 0 to LARGEST in ASCII digits, with or without leading zeros.
    """
    if not (name.isascii() and name.isdigit()):
        return None
    number = int(name)
    return number if number <= LARGEST else None
