"""Formats sizes for people."""

from __future__ import annotations

from typing import Any


def size_text(num_bytes: Any) -> str:
    """Returns a size as "1.3 MB", in powers of ten."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
