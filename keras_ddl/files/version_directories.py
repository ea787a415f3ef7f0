"""Which directories are versions of a model: what an export writes, and what a server looks for."""

from __future__ import annotations

LARGEST = 2**63 - 1  # TensorFlow Serving keeps a version as an int64


def number_of(name: str) -> int | None:
    """Returns the version that a directory of this name is; None: it is none.

    As in TensorFlow Serving it is a number from 0 to LARGEST in ASCII digits, which may have leading zeros (00000123).
    """
    if not (name.isascii() and name.isdigit()):
        return None
    number = int(name)
    return number if number <= LARGEST else None
