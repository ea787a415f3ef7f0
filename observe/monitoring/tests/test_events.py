"""The event log of a job, and the pages that describe it, tested without ranks."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from harness.event_lines import read_events
from keras_ddl.errors import ConfigError
from keras_ddl.launch import job as job_module
from keras_ddl.launch import restarts
from keras_ddl.launch.job import JobResult
from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.output.screen import Screen
from keras_ddl.launch.output.sinks import FileDescriptorSink
from keras_ddl.launch.watchers import Watchers
from keras_ddl.monitoring import events as events_module
from keras_ddl.monitoring.events import EventLog


def fail(text: str) -> None:
    raise AssertionError(text)


def test_event_log_appends_complete_lines_beside_other_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, written, real = tmp_path / "events.jsonl", list[bytes](), os.write

    def write_once(descriptor: int, data: bytes) -> int:
        written.append(data)
        return real(descriptor, data)

    monkeypatch.setattr(events_module.os, "write", write_once)
    logs = [EventLog(path, fail) for _ in range(4)]

    def write(log: EventLog) -> None:
        for number in range(50):
            log.event("signal", {"signal": "SIGUSR1", "pid": number + 1, "error": "x" * number})

    threads = [threading.Thread(target=write, args=[log]) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(path)
    assert len(events) == 200
    lines = [each for each in written if each.startswith(b'{"time": ') and each.endswith(b"}\n")]
    assert len(lines) == 200, "one write for each"
    by_job = {each["job"]: [other["pid"] for other in events if other["job"] == each["job"]] for each in events}
    assert list(by_job.values()) == [list(range(1, 51))] * 4


def test_event_log_on_a_full_disk_ends_with_a_complete_line_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "events.jsonl", list[str]()
    log = EventLog(path, said.append)
    log.event("signal", {"signal": "SIGUSR1"})
    write = os.write
    monkeypatch.setattr(events_module.os, "write", lambda fd, data: write(fd, data[:9]))
    log.event("signal", {"signal": "SIGUSR2"})
    monkeypatch.undo()
    log.event("end", {"status": 0})
    assert [each["signal"] for each in read_events(path)] == ["SIGUSR1"]
    assert said == [f"the event log {path} ends here: no space left. The job continues."]


def test_event_log_refuses_files_that_could_block_the_launcher(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in ((tmp_path / "pipe", "regular file"), (tmp_path / "no" / "file", "No such file")):
        with pytest.raises(ConfigError, match=message):
            EventLog(path, fail)


def test_event_log_hides_secrets_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Supervisor:  # starts nothing
        changing = None

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def run(self, _: Any) -> JobResult:
            return JobResult([RankOutcome(0, status=0)])

    monkeypatch.setattr(restarts, "Supervisor", Supervisor)
    job = job_module.make([sys.executable, "--password=p1", "-x", "PASSWORD=p2", "--lr=1"], num_ranks=1)
    watchers = Watchers([EventLog(tmp_path / "events", print)])
    restarts.RestartLoop(job, Screen(FileDescriptorSink(1), FileDescriptorSink(2)), watchers=watchers).run(())
    (start,) = read_events(tmp_path / "events")
    assert start["command"] == [sys.executable, "--password=***", "-x", "PASSWORD=***", "--lr=1"]
