"""Digests of files, and records that tell when they or their files were altered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal. Cost: one read of it, some 1 GB/s."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_bytes(content: bytes) -> str:
    """Returns the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `record` with the SHA-256 of its own JSON added, so that one altered byte shows (`is_sealed`)."""
    return {**record, "sha256": _digest_of(record)}


def is_sealed(record: Any) -> bool:
    """Whether a record read back from JSON is what `sealed` returned."""
    return isinstance(record, dict) and record.get("sha256") == _digest_of(record)


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns relative file name -> {bytes, sha256} of every file under `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files}


def size_of(folder: Path) -> int:
    """Returns the bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def difference(folder: Path, files: Mapping[str, Mapping[str, Any]], *, contents: bool) -> str | None:
    """Returns how `folder` differs from its `inventory`, or None. Extra files do not count.

    With `contents`, every file is read and its SHA-256 compared; else only sizes are.
    """
    for name, record in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != record["bytes"]:
            return f"{name} has {size} of {record['bytes']} bytes (cut short, or still being copied)"
        try:
            if contents and digest(path) != record["sha256"]:
                return f"{name} was altered after it was written (its SHA-256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _digest_of(record: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in record.items() if name != "sha256"}
    return digest_bytes(json.dumps(rest, sort_keys=True).encode())
