"""Reads event logs, and holds each line against the schema in docs/monitoring.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def schema() -> dict[str, Any]:
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return json.loads(block)


def parse_events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events, which are as the page says."""
    import jsonschema  # which takes seconds to import

    events = parse_events(path)
    validator = jsonschema.Draft202012Validator(schema())
    for event in events:
        validator.validate(event)
    return events
