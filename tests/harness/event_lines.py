"""Reads event logs, checking each line against observe/monitoring/event_schema.json, and reads metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "observe" / "monitoring"
PAGE, SCHEMA = FOLDER / "docs" / "monitoring.md", FOLDER / "event_schema.json"


def schema() -> dict[str, Any]:
    return json.loads(SCHEMA.read_text())


def parse_events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events after checking them against the schema."""
    import jsonschema  # its import takes seconds

    events = parse_events(path)
    validator = jsonschema.Draft202012Validator(schema())
    for event in events:
        validator.validate(event)
    return events


def values_of(families: Iterable[Any]) -> dict[str, float]:
    """Returns metrics of prometheus_client as {name with all labels but the host: value}."""

    def name_of(sample: Any) -> str:
        labels = [value for name, value in sample.labels.items() if name != "host"]
        return "/".join([sample.name.removeprefix("keras_ddl_"), *labels])

    return {name_of(each): each.value for family in families for each in family.samples}
