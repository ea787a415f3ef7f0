"""Watches a training from outside while some of its ranks are killed: metrics and events, which must agree."""

from __future__ import annotations

import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.event_lines import read_events, values_of
from launch.launching import STARTERS, Started, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.long]

# 4 epochs of 50 steps, 32 rows each, slow enough to be watched; then 51 calls of a function, 8 rows each.
TRAINING = """
import signal, sys
import keras, keras_ddl
import numpy as np
strategy = keras_ddl.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=(1600, 4)).astype("float32")

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
    def on_epoch_begin(self, epoch, logs=None):
        if sys.argv[1:] == [str(RANK)] and epoch == 2 and os.environ.get("KERAS_DDL_RESTART", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)

checkpoint = keras_ddl.callbacks.Checkpoint("ckpt", resume=True)
model.fit(x, x[:, :1], batch_size=32, epochs=4, verbose=0, callbacks=[Slow(), checkpoint])
step = strategy.function(lambda x: keras.ops.sum(model(x)))
for _ in range(50):
    step(x[:8]); time.sleep(0.02)
time.sleep(1.2)
step(x[:8])
here("done")
while not Path("watched").exists(): time.sleep(0.05)
"""


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return values_of(text_string_to_metric_families(answer.read().decode()))


def watch(started: Started, port: int, done: list[Path]) -> list[dict[str, float]]:
    """Scrapes until some of the ranks are done and their last figures have arrived."""
    scrapes: list[dict[str, float]] = []
    deadline = time.monotonic() + 600
    while not all(path.exists() for path in done):
        assert started.process.poll() is None, started.finish()
        assert time.monotonic() < deadline
        try:
            scrapes.append(scrape(port))
        except OSError:  # the server is not listening yet
            assert not scrapes
        time.sleep(0.3)
    time.sleep(4)
    scrapes.append(scrape(port))
    return scrapes


@pytest.mark.parametrize("killed", [None, 0, 1])
def test_metrics_of_a_training_that_continues_without_a_rank(killed: int | None, tmp_path: Path) -> None:
    program, port = write_program(tmp_path, TRAINING), free_port()
    options = ["--metrics-port", str(port), "--events", "events.jsonl"]
    started = Started(
        ["run", "-np", "2:3", *options, "python", program, *([] if killed is None else [str(killed)])], tmp_path
    )
    left = [rank for rank in range(3) if rank != killed]
    scrapes = watch(started, port, [tmp_path / f"done-{rank}" for rank in left])
    (tmp_path / "watched").touch()
    ended = started.finish()
    assert ended.status == 0, ended
    last = scrapes[-1]
    assert (last["ranks_alive"], last["ranks_expected"]) == (len(left), 3)
    assert last["lost_ranks_total"] == 3 - len(left) and last["restarts_total"] == 0
    assert [last[f"rank_up/{rank}"] for rank in range(3)] == [float(rank in left) for rank in range(3)]
    # A new first rank counts from its first report on: up to a second of steps and rows is missing.
    missing = 0 if killed != 0 else 60
    assert 251 - missing <= last["steps_total"] <= 251
    assert 6808 - 32 * missing <= last["rows_total"] <= 6808
    events = read_events(tmp_path / "events.jsonl")
    steps = [each["step"] for each in events if each["event"] == "checkpoint"]
    # The checkpoint that rank 0 was writing when it was killed may be missing.
    assert steps == [50, 100, 150, 200] or (killed == 0 and steps == [50, 150, 200])
    assert last["checkpoints_total"] == len(steps) and last["last_checkpoint_step"] == 200
    assert last["log/loss"] > 0 and last["log/mae"] > 0 and last["epoch"] == 3
    assert 0 < last["exposed_communication_seconds_total"] < ended.seconds
    for name in ("steps_total", "rows_total", "exposed_communication_seconds_total", "checkpoints_total"):
        seen = [each[name] for each in scrapes if name in each]
        assert seen == sorted(seen) and len(set(seen)) > 2, name
    assert [each["rank"] for each in events if each["event"] == "rank_lost"] == [r for r in [killed] if r is not None]


@pytest.mark.parametrize("starter", STARTERS)
def test_metrics_of_a_restarted_training(starter: dict[str, str], tmp_path: Path) -> None:
    program, port = write_program(tmp_path, TRAINING), free_port()
    options = ["--restarts", "1", "--metrics-port", str(port), "--events", "events.jsonl"]
    started = Started(["run", "-np", "2", *options, "python", program, "1"], tmp_path, env=starter)
    scrapes = watch(started, port, [tmp_path / f"done-{rank}" for rank in range(2)])
    (tmp_path / "watched").touch()
    assert (ended := started.finish()).status == 0, ended
    last = scrapes[-1]
    assert (last["restarts_total"], last["lost_ranks_total"], last["ranks_alive"]) == (1, 1, 2)
    # The second attempt resumes after epoch 1: 150 more steps. Steps after the first attempt's last report are missing.
    assert 251 - 60 <= last["steps_total"] <= 251
    assert any("log/loss" not in each for each in scrapes[len(scrapes) // 2 :]), "stale logs are still shown"
    assert last["checkpoints_total"] == 4
    events = read_events(tmp_path / "events.jsonl")
    assert {each["starter"] for each in events if each["event"] == "start"} == {"mpirun" if starter else "host_ranks"}
    assert [each["step"] for each in events if each["event"] == "checkpoint"] == [50, 100, 150, 200]
