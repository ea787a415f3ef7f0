"""An event log, tested without ranks."""

import json
from pathlib import Path

from keras_ddl.monitoring.events import EventLog


def test_event_log_begins_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"half of a line')
    EventLog(path, print).event("end", {"status": 0})
    half, line = path.read_text().splitlines()
    assert half == '{"half of a line' and json.loads(line)["status"] == 0
