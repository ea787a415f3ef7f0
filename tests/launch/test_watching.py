"""The event log and the metrics of a job, without ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.files import last_checkpoint, news
from keras_ddl.launch import events as events_module
from keras_ddl.launch import job as job_module
from keras_ddl.launch import metrics_server, rank_news, restarts
from keras_ddl.launch.events import EventLog
from keras_ddl.launch.job import JobResult
from keras_ddl.launch.metrics import Metrics
from keras_ddl.launch.metrics_server import MetricsServer
from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.output import Screen
from keras_ddl.launch.rank_news import RankNews
from keras_ddl.launch.sinks import FileDescriptorSink
from keras_ddl.launch.watchers import Watchers
from launch.event_lines import PAGE, read_events, schema

ROOT = Path(__file__).parents[2]


class Notes:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.last_figures: dict[int, dict[str, Any]] = {}

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))

    def figures(self, rank: int, figures: dict[str, Any]) -> None:
        self.last_figures[rank] = figures


# ---- events ----------------------------------------------------------------------------------------------------------


def fail(text: str) -> None:
    raise AssertionError(text)


def test_event_log_appends_whole_lines_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_event_log_begins_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"half of a line')
    EventLog(path, fail).event("end", {"status": 0})
    half, line = path.read_text().splitlines()
    assert half == '{"half of a line' and json.loads(line)["status"] == 0


def test_event_log_on_a_full_disk_ends_with_a_line_and_one_message(
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
    assert said == [f"the event log {path} ends here: no space left. The job goes on."]


def test_event_log_refuses_what_could_hold_the_launcher_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in ((tmp_path / "pipe", "regular file"), (tmp_path / "no" / "file", "No such file")):
        with pytest.raises(ConfigError, match=message):
            EventLog(path, fail)


def test_schema_of_the_page_refuses_other_lines() -> None:
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(schema())
    line = {
        "time": "2026-01-31T12:00:00.123Z",
        "event": "rank_lost",
        "job": "0" * 16,
        "rank": 1,
        "ranks": 2,
        "reason": "x",
    }
    validator.validate(line)
    for change in ({"event": "walk"}, {"rank": "1"}, {"more": 1}, {"time": "today"}, {"event": "rank_end"}):
        assert list(validator.iter_errors({**line, **change})), change


def test_page_names_every_event_and_metric() -> None:
    text = PAGE.read_text()
    for name in schema()["properties"]["event"]["enum"]:
        assert f"`{name}`" in text.partition("```json")[0]
    metrics = a_job()
    for metric in metrics.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert re.search(rf"`{name}[`{{]", text), name
    for name in set(re.findall(r"keras_ddl_\w+", text)) - {"keras_ddl_ranks"}:
        assert name.removesuffix("_total") in {each.name for each in metrics.collect()}, name


def test_scrape_configuration_of_the_page_is_what_prometheus_reads() -> None:
    """By its documentation; `promtool check config` is not at hand here."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    assert job.keys() == {"job_name", "scrape_interval", "static_configs"}
    assert re.fullmatch(r"\d+s", job["scrape_interval"])
    assert all(re.fullmatch(r"[\w.]+:\d+", each) for some in job["static_configs"] for each in some["targets"])


# ---- news of ranks ---------------------------------------------------------------------------------------------------


def test_news_of_a_rank_come_once_a_second_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_news.time, "monotonic", lambda: clock[0])
    clock, own = [10.0], RankNews(tmp_path, {"figures": True})
    assert own.take() == {}
    news.write_figures(str(tmp_path), {"steps": 3, "logs": {"loss": 0.5}})
    monkeypatch.setattr(last_checkpoint, "_known", {})
    for step in (1, 2):
        last_checkpoint.note(tmp_path / f"step-{step}", step, True, str(tmp_path), is_news=True)
    assert own.take() == {}
    clock[0] += 1.0
    taken = own.take()
    assert taken["figures"] == {"steps": 3, "logs": {"loss": 0.5}}
    assert [(each["step"], each["path"]) for each in taken["checkpoints"]] == [
        (step, str(tmp_path / f"step-{step}")) for step in (1, 2)
    ]
    clock[0] += 1.0
    assert own.take() == {}
    last_checkpoint.note(tmp_path / "step-9", 9, True, str(tmp_path))  # resumed from it
    last_checkpoint.note(tmp_path / "step-3", 3, True, str(tmp_path), is_news=True)
    assert own.take() == {}
    assert [each["step"] for each in own.take(is_last=True)["checkpoints"]] == [3]


def test_news_that_nobody_wants_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_checkpoint, "_known", {})
    last_checkpoint.note(tmp_path / "step-1", 1, True, str(tmp_path), is_news=True)
    news.write_figures(str(tmp_path), {"steps": 1})
    assert not news.is_wanted(str(tmp_path), news.FIGURES) and not news.is_wanted(None, news.FIGURES)
    assert [path.name for path in tmp_path.iterdir()] == [last_checkpoint.FILE]
    RankNews(tmp_path, {"figures": False})
    assert not news.is_wanted(str(tmp_path), news.FIGURES) and news.is_wanted(str(tmp_path), news.CHECKPOINTS)


@pytest.mark.parametrize("what", ["torn", "empty", "junk", "no dict"])
def test_news_that_are_damaged_are_none(tmp_path: Path, what: str) -> None:
    path = tmp_path / news.FIGURES
    path.touch()
    news.write_figures(str(tmp_path), {"steps": 123} if what != "no dict" else [])  # type: ignore[arg-type]
    data = path.read_bytes()
    path.write_bytes({"torn": data[:-3] + b"99}", "empty": b"", "junk": b"x" * 40, "no dict": data}[what])
    assert news.read_figures(tmp_path) is None


def test_watchers_tell_of_checkpoints_and_of_ranks_that_had_started() -> None:
    notes = Notes()
    watchers = Watchers([notes], figures=True)
    assert watchers.wanted == {"figures": True} and Watchers().wanted is None
    watchers.start(restart=0, ranks=3)
    outcomes = [RankOutcome(rank, host="h", status=status) for rank, status in enumerate((3, -9, None))]
    for outcome in outcomes[:2]:
        watchers.take(outcome, json.dumps({"pid": 70 + outcome.rank}).encode())
    watchers.take(outcomes[0], json.dumps({"checkpoints": [{"path": "/c/1", "step": 1}, {"path": 5}]}).encode())
    outcomes[0].report = {"summary": "ValueError: bad"}
    for outcome in outcomes * 2:
        watchers.rank_end(outcome)
    names = [(name, fields.get("rank")) for name, fields in notes.events[1:]]
    assert names == [("rank_start", 0), ("rank_start", 1), ("checkpoint", 0), ("rank_end", 0), ("rank_end", 1)]
    assert notes.events[-2][1] == {
        "rank": 0,
        "host": "h",
        "pid": 70,
        "status": 3,
        "lost": False,
        "error": "ValueError: bad",
    }
    assert notes.events[-1][1] == {"rank": 1, "host": "h", "pid": 71, "signal": "SIGKILL", "lost": True}


# ---- metrics ---------------------------------------------------------------------------------------------------------


def start(metrics: Metrics, ranks: int, more: tuple[int, ...] = ()) -> None:
    metrics.event("start", {"restart": 0, "ranks": ranks, "starter": "host_ranks"})
    for rank in (*range(ranks), *more):
        metrics.event("rank_start", {"rank": rank, "host": "h", "pid": 1})


def end(metrics: Metrics, rank: int, *, lost: bool) -> None:
    metrics.event("rank_end", {"rank": rank, "host": "h", "pid": 1, "lost": lost})


def a_job() -> Metrics:
    metrics = Metrics()
    start(metrics, 2)
    metrics.figures(0, {"steps": 5, "rows": 50, "exposed": 0.5, "epoch": 0, "logs": {"loss": 0.25}})
    metrics.event("checkpoint", {"rank": 0, "host": "h", "step": 5, "path": "/c"})
    return metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Name (and labels but the host) -> value."""
    return {
        "/".join(
            [sample.name.removeprefix("keras_ddl_"), *(v for k, v in sample.labels.items() if k != "host")]
        ): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }


def test_metrics_of_a_rank_that_died_vanish_and_counters_go_on() -> None:
    metrics = a_job()
    shown = values(metrics)
    assert (shown["ranks_alive"], shown["ranks_expected"], shown["rank_up/0"]) == (2, 2, 1)
    assert (shown["steps_total"], shown["rows_total"], shown["log/loss"], shown["epoch"]) == (5, 50, 0.25, 0)
    end(metrics, 0, lost=True)
    shown = values(metrics)
    assert (shown["ranks_alive"], shown["ranks_expected"], shown["rank_up/0"], shown["lost_ranks_total"]) == (
        1,
        2,
        0,
        1,
    )
    assert (shown["steps_total"], shown["rows_total"]) == (5, 50)
    assert not {"log/loss", "epoch", "last_figures_timestamp_seconds"} & shown.keys()
    # The next first rank has made the same steps, and counts rows from here on.
    metrics.event("rank_lost", {"rank": 0, "ranks": 1, "reason": ""})
    metrics.figures(1, {"steps": 7, "rows": 20, "exposed": 0.1, "logs": {"loss": 0.125}})
    metrics.figures(1, {"steps": 8, "rows": 30, "exposed": 0.2, "logs": {"loss": 0.125}})
    shown = values(metrics)
    assert (shown["steps_total"], shown["rows_total"], shown["log/loss"]) == (8, 60, 0.125)
    assert shown["exposed_communication_seconds_total"] == pytest.approx(0.6)


def test_metrics_go_on_through_a_restart() -> None:
    metrics = a_job()
    for rank in (0, 1):
        end(metrics, rank, lost=rank == 1)
    metrics.event("restart", {"restart": 1, "reason": ""})
    start(metrics, 2)
    assert "log/loss" not in values(metrics)
    metrics.figures(0, {"steps": 2, "rows": 20, "logs": {}})
    metrics.figures(0, {"steps": 4, "rows": 40, "logs": {}})
    shown = values(metrics)
    assert (shown["restarts_total"], shown["lost_ranks_total"], shown["steps_total"], shown["rows_total"]) == (
        1,
        1,
        9,
        90,
    )
    assert (shown["ranks_alive"], shown["checkpoints_total"], shown["last_checkpoint_step"]) == (2, 1, 5)
    assert 0 <= shown["last_checkpoint_age_seconds"] < 60


def test_metrics_count_spares_when_they_have_joined() -> None:
    metrics = Metrics()
    start(metrics, 2, more=(2,))
    assert values(metrics)["ranks_alive"] == 2
    end(metrics, 1, lost=True)
    metrics.event("rank_lost", {"rank": 1, "ranks": 1, "reason": ""})
    metrics.event("rank_joined", {"rank": 2, "ranks": 2})
    shown = values(metrics)
    assert (shown["ranks_alive"], shown["ranks_expected"], shown["joined_ranks_total"]) == (2, 2, 1)
    metrics.event("rank_left", {"rank": 2, "ranks": 1, "reason": ""})
    assert values(metrics)["ranks_expected"] == 1


def test_metrics_of_a_program_without_a_strategy_are_those_of_its_ranks() -> None:
    metrics = Metrics()
    start(metrics, 2)
    shown = values(metrics)
    assert shown["ranks_alive"] == 2
    assert not {"steps_total", "rows_total", "exposed_communication_seconds_total"} & shown.keys()


def test_metrics_leave_out_what_is_no_number() -> None:
    metrics = Metrics()
    start(metrics, 1)
    logs = {"nan": float("nan"), "text": "x", "list": [1], "flag": True, "x" * 500: 1}
    metrics.figures(0, {"steps": "many", "rows": None, "logs": {**logs, **{f"m{i}": i for i in range(500)}}})
    names = [name for name in values(metrics) if name.startswith("log/")]
    assert names[:2] == ["log/nan", f"log/{'x' * 100}"] and len(names) < 200
    metrics.figures(0, {"logs": [1]})
    assert not [name for name in values(metrics) if name.startswith("log/")]


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setattr(metrics_server, "_CONNECTION_SECONDS", 1.0)
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1.0)
    server = MetricsServer("127.0.0.1", 0)
    server.watcher.event("start", {"restart": 0, "ranks": 2, "starter": "mpirun"})
    yield server
    server.close()


def scrape(server: MetricsServer) -> dict[str, float]:
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for each in text_string_to_metric_families(text) for sample in each.samples}


def test_server_answers_in_prometheus_words(server: MetricsServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    shown = scrape(server)
    assert shown["keras_ddl_ranks_expected"] == 2 and shown["keras_ddl_job_start_time_seconds"] <= time.time()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.url.replace("/metrics", "/other"), timeout=10)
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(LaunchError, match=f"Received: port {port}, address 127.0.0.1"):
        MetricsServer("127.0.0.1", port)
    for address in ("a..b", "a" * 64):  # no name of a host
        with pytest.raises(LaunchError, match=rf"Received: port 0, address {re.escape(address)} \("):
            MetricsServer(address, 0)


def test_server_serves_on_when_threads_could_not_be_started(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(2 * metrics_server._AT_ONCE):
            mine, other = socket.socketpair()
            with mine, other, pytest.raises(RuntimeError):
                server._server.process_request(mine, None)
    assert scrape(server)["keras_ddl_ranks_expected"] == 2


def test_strangers_hold_up_neither_launcher_nor_server_for_long(server: MetricsServer) -> None:
    host, port = server.url.removeprefix("http://").partition("/")[0].split(":")
    strangers, over, most, before = list[socket.socket](), threading.Event(), 0, threading.active_count()
    for _ in range(40):
        strangers.append(socket.create_connection((host, int(port))))
        time.sleep(0.01)
        most = max(most, threading.active_count())
    assert most - before < 20, "no more threads than connections that are allowed, two for each"

    def send_slowly() -> None:  # bytes that never end, and never are late
        while not over.wait(0.1):
            for each in strangers:
                try:
                    each.send(b"x")
                except OSError:
                    pass

    thread = threading.Thread(target=send_slowly)
    thread.start()
    try:
        began = time.monotonic()
        for rank in range(1000):
            server.watcher.event("rank_start", {"rank": rank, "host": "h"})
        assert time.monotonic() - began < 10  # 20 ms; one that waits for strangers waits for each event
        deadline, shown = time.monotonic() + 60, None
        while shown is None:
            try:
                shown = scrape(server)
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert shown["keras_ddl_ranks_alive"] == 2
    finally:
        over.set()
        thread.join()
        for each in strangers:
            each.close()


def test_metrics_without_prometheus_client_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (needs,) = extras["metrics"]
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"Install it: .*pip install 'keras_ddl\[metrics\]'$"):
        MetricsServer("127.0.0.1", 0)
    assert needs in extras["serving"] and "serving" in extras["cpu"][0] and "serving" in extras["gpu"][0]  # as it says
    assert "pip install 'keras_ddl[metrics]'" in PAGE.read_text()


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
