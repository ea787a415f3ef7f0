"""Computes digests of files, and records that reveal alterations."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_ddl.files import foreign


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal. Cost: one read of the file, about 1 GB/s."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_bytes(content: bytes) -> str:
    """Returns the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `record` with the SHA-256 of its own JSON added; `is_sealed` detects an altered byte."""
    return {**record, "sha256": _digest_of(record)}


def is_sealed(record: Any) -> bool:
    """Whether a record read from JSON is unchanged since `sealed`."""
    return isinstance(record, dict) and record.get("sha256") == _digest_of(record)


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns relative file name -> {bytes, sha256} for every file under `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files}


def size_of(folder: Path) -> int:
    """Returns the total size of all files under `folder`, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def difference(folder: Path, files: Mapping[str, Mapping[str, Any]], *, contents: bool) -> str | None:
    """Returns how `folder` differs from its `inventory`, or None. Extra files are ignored.

    A link below `folder` is not followed, and counts as a difference.
    `contents`: read every file and compare its SHA-256; otherwise only sizes are compared.
    """
    records = files.values() if isinstance(files, Mapping) else [None]
    if not all(isinstance(each, Mapping) and {"bytes", "sha256"} <= each.keys() for each in records):
        return "its list of files is damaged"
    for name, record in files.items():
        try:
            with foreign.open_regular(folder, name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != record["bytes"]:
                    return f"{name} has {size} of {record['bytes']} bytes (truncated, or still being copied)"
                if contents and hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                    return f"{name} was altered after it was written (its SHA-256 differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _digest_of(record: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in record.items() if name != "sha256"}
    return digest_bytes(json.dumps(rest, sort_keys=True).encode())
