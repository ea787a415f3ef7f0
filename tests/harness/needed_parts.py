"""Skips tests of the core that use an optional part in passing, where it is not installed."""

from __future__ import annotations

import pytest

from keras_ddl import parts


def needs_part(word: str) -> pytest.MarkDecorator:
    """`word`: a part, or a command, option or callback of it."""
    return pytest.mark.skipif(parts.is_missing(word), reason=f"{word} belongs to a part that is not installed")
