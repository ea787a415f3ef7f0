"""Reads event logs, and holds each line against the schema in observe/monitoring/docs/monitoring.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "observe" / "monitoring" / "docs" / "monitoring.md"


def schema() -> dict[str, Any]:
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return json.loads(block)


def read_events(path: Path) -> list[dict[str, Any]]:
    import jsonschema  # which takes a second to import

    text = path.read_text()
    assert text.endswith("\n")
    events = [json.loads(line) for line in text.splitlines()]
    validator = jsonschema.Draft202012Validator(schema())
    for event in events:
        validator.validate(event)
    return events
