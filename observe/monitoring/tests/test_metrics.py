"""The metrics of a job, and the server from which Prometheus reads them, tested without ranks."""

from __future__ import annotations

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

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.event_lines import PAGE, schema, values_of
from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.monitoring import metrics_server
from keras_ddl.monitoring.metrics import Metrics
from keras_ddl.monitoring.metrics_server import MetricsServer

ROOT = Path(__file__).parents[3]


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
    """Returns name (and labels except the host) -> value."""
    return values_of(metrics.collect())


def some(metrics: Metrics, names: str) -> list[float]:
    return [values(metrics)[name] for name in names.split()]


def test_gauges_of_a_dead_rank_vanish_and_counters_continue() -> None:
    metrics = a_job()
    assert some(metrics, "ranks_alive ranks_expected rank_up/0 steps_total rows_total") == [2, 2, 1, 5, 50]
    assert some(metrics, "log/loss epoch") == [0.25, 0]
    end(metrics, 0, lost=True)
    assert some(metrics, "ranks_alive ranks_expected rank_up/0 lost_ranks_total") == [1, 2, 0, 1]
    assert some(metrics, "steps_total rows_total") == [5, 50]
    assert not {"log/loss", "epoch", "last_figures_timestamp_seconds"} & values(metrics).keys()
    # The next first rank has made the same steps, and counts rows from this point on.
    metrics.event("rank_lost", {"rank": 0, "ranks": 1, "reason": ""})
    metrics.figures(1, {"steps": 7, "rows": 20, "exposed": 0.1, "logs": {"loss": 0.125}})
    metrics.figures(1, {"steps": 8, "rows": 30, "exposed": 0.2, "logs": {"loss": 0.125}})
    assert some(metrics, "steps_total rows_total log/loss") == [8, 60, 0.125]
    assert some(metrics, "exposed_communication_seconds_total") == [pytest.approx(0.6)]


def test_counters_continue_after_a_restart() -> None:
    metrics = a_job()
    for rank in (0, 1):
        end(metrics, rank, lost=rank == 1)
    metrics.event("restart", {"restart": 1, "reason": ""})
    start(metrics, 2)
    assert "log/loss" not in values(metrics)
    metrics.figures(0, {"steps": 2, "rows": 20, "logs": {}})
    metrics.figures(0, {"steps": 4, "rows": 40, "logs": {}})
    assert some(metrics, "restarts_total lost_ranks_total steps_total rows_total") == [1, 1, 9, 90]
    assert some(metrics, "ranks_alive checkpoints_total last_checkpoint_step") == [2, 1, 5]
    assert 0 <= values(metrics)["last_checkpoint_age_seconds"] < 60


def test_spares_count_once_they_have_joined() -> None:
    metrics = Metrics()
    start(metrics, 2, more=(2,))
    assert values(metrics)["ranks_alive"] == 2
    end(metrics, 1, lost=True)
    metrics.event("rank_lost", {"rank": 1, "ranks": 1, "reason": ""})
    metrics.event("rank_joined", {"rank": 2, "ranks": 2})
    assert some(metrics, "ranks_alive ranks_expected joined_ranks_total") == [2, 2, 1]
    metrics.event("rank_left", {"rank": 2, "ranks": 1, "reason": ""})
    assert values(metrics)["ranks_expected"] == 1


def test_metrics_omit_values_that_are_not_numbers() -> None:
    metrics = Metrics()
    start(metrics, 1)
    logs = {"nan": float("nan"), "text": "x", "list": [1], "flag": True, "x" * 500: 1}
    metrics.figures(0, {"steps": "many", "rows": None, "logs": {**logs, **{f"m{i}": i for i in range(500)}}})
    names = [name for name in values(metrics) if name.startswith("log/")]
    assert names[:2] == ["log/nan", f"log/{'x' * 100}"] and len(names) < 200
    metrics.figures(0, {"logs": [1]})
    assert not [name for name in values(metrics) if name.startswith("log/")]


def test_page_names_every_event_and_metric() -> None:
    text = PAGE.read_text()
    for name in schema()["properties"]["event"]["enum"]:
        assert f"`{name}`" in text
    metrics = a_job()
    for metric in metrics.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        assert re.search(rf"`{name}[`{{]", text), name
    for name in set(re.findall(r"keras_ddl_\w+", text)) - {"keras_ddl_ranks"}:
        assert name.removesuffix("_total") in {each.name for each in metrics.collect()}, name


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


def test_server_answers_in_prometheus_format(server: MetricsServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    shown = scrape(server)
    assert shown["keras_ddl_ranks_expected"] == 2 and shown["keras_ddl_job_start_time_seconds"] <= time.time()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.url.replace("/metrics", "/other"), timeout=10)
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(LaunchError, match=f"Received: port {port}, address 127.0.0.1"):
        MetricsServer("127.0.0.1", port)
    for address in ("a..b", "a" * 64):  # invalid host names
        with pytest.raises(LaunchError, match=rf"Received: port 0, address {re.escape(address)} \("):
            MetricsServer(address, 0)


def test_server_continues_after_failing_to_start_threads(
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


def test_slow_clients_block_neither_launcher_nor_server_for_long(server: MetricsServer) -> None:
    host, port = server.url.removeprefix("http://").partition("/")[0].split(":")
    strangers, over, most, before = list[socket.socket](), threading.Event(), 0, threading.active_count()
    for _ in range(40):
        strangers.append(socket.create_connection((host, int(port))))
        time.sleep(0.01)
        most = max(most, threading.active_count())
    assert most - before < 20, "no more threads than connections that are allowed, two for each"

    def send_slowly() -> None:  # endless bytes that are never late
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
        assert time.monotonic() - began < 10  # takes 20 ms; a server that waited for clients would wait for each event
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


def test_metrics_without_prometheus_client_name_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (needs,) = extras["metrics"]
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=rf"Install it: .*pip install '{needs}'$"):
        MetricsServer("127.0.0.1", 0)
    assert needs in extras["serving"] and "serving" in extras["cpu"][0] and "serving" in extras["gpu"][0]
    assert "pip install '.[metrics]'" in PAGE.read_text()
