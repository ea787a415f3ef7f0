"""Skips tests of the core that also use an optional part if that part is not installed."""

from __future__ import annotations

import pytest

from keras_ddl import parts


def needs_part(word: str) -> pytest.MarkDecorator:
    """`word`: a part, or one of its commands, options or callbacks."""
    return pytest.mark.skipif(parts.is_missing(word), reason=f"{word} belongs to a part that is not installed")
