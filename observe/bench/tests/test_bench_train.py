"""keras-ddl bench train: a short run of real jobs, its arithmetic against hand-computed values, and refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from keras_ddl.bench.training import networks, prediction, report, rounds, subject
from keras_ddl.bench.training.overlap import Traffic, traffic, union
from keras_ddl.bench.training.rank import Plan, Reached, Sample
from keras_ddl.errors import ConfigError
from launch.launching import run

SUBJECT = """
import keras, numpy as np
import keras_ddl

def rows(count, seed):
    x = np.random.default_rng(seed).normal(size=(count, 8)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32")

def subject(batch):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model, rows(16 * batch, 0), rows(64, 1)

def wrong(batch):
    return *subject(batch), 4
"""


def plan(**changes) -> Plan:
    settings = {"name": "cnn", "batch": 10, "strong": False, "steps": 5, "cores": 1, "to_accuracy": None, "epochs": 9}
    return Plan(**settings | changes)


@pytest.mark.long
@pytest.mark.parallel
@pytest.mark.slow
def test_bench_train_measures_a_user_function_on_one_rank_and_two(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SUBJECT)
    words = ["bench", "train", "mine:subject", "--rounds", "1", "--steps", "4", "--batch", "8", "--to-accuracy", "0.8"]
    words += ["--predict", "hosts=4,devices=2,link=10Gb", "--json", "out.json", "--plot", "out.svg"]
    # TensorFlow compiles autograph's output in the folder for temporary files.
    ended = run(words, tmp_path, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert ended.status == 0, ended
    content = json.loads((tmp_path / "out.json").read_text())
    one, two = content["measured"]
    assert [one["ranks"], two["ranks"], one["batch"], two["batch"]] == [1, 2, 8, 16]
    assert content["gradient_bytes"] == 4 * (8 * 16 + 16 + 16 * 2 + 2)
    assert one["efficiency"] == 1 and one["communication"] is None
    assert two["efficiency"] == pytest.approx(one["step"] / two["step"])
    assert two["rows_per_second"] == pytest.approx(16 / two["step"])
    assert 0 < two["exposed"] <= two["communication"] < two["step"] < 60
    for row in (one, two):
        assert row["reached"]["is_reached"] and row["reached"]["accuracy"] >= 0.8 and row["reached"]["seconds"] > 0
        assert f"{row['ranks']:>5}  {row['batch']:>5}  {1e3 * row['step']:>7.1f}" in ended.out, ended
    assert [row["ranks"] for row in content["predicted"]] == [2, 4, 8]
    assert "PREDICTED, not measured: link 10Gb, inside 40GB" in ended.out
    assert all(f"  {name}: {text}" in ended.out for name, text in report.HOW.items()), ended
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def sample(step: float, traffic: Traffic | None = None, reached: Reached | None = None) -> Sample:
    return Sample(step, traffic, 4_000_000, 1, 2, "CPU, 2 cores, Linux, 2 ranks", reached)


def test_rows_are_medians_of_the_slowest_rank() -> None:
    sent = [Traffic(0.004, 0.001 * n, 0.0, 0.02, 4e6, 0.5, 0.75) for n in (1, 2, 3)]
    turns = {1: [[sample(step)] for step in (0.1, 0.3, 0.2)]}
    turns[4] = [[sample(0.2, one), sample(step, one)] for one, step in zip(sent, (0.25, 0.5, 0.1))]
    found = rounds.summary(plan(cores=1), turns)
    assert [row.step for row in found.rows] == [0.2, 0.25]  # the medians of three rounds
    assert [row.efficiency for row in found.rows] == [1, pytest.approx(0.8)]
    assert found.rows[1].rows_per_second == pytest.approx(40 / 0.25)
    assert (found.rows[1].exposed, found.rows[1].lead, found.rows[1].wire) == (0.002, 0.02, 0.5)
    assert found.rows[1].sharers == 2  # 4 ranks that use a core each, on 2 cores
    strong = rounds.summary(plan(strong=True), turns).rows[1]
    assert (strong.batch, strong.efficiency) == (10, pytest.approx(0.2))
    written = io.StringIO()
    report.show(report.console(written), plan(), found, [], 3)
    assert "4 ranks: 2 share a core, so the efficiency is at most 50%" in written.getvalue()


def test_traffic_counts_exchanges_after_the_backward_pass(tmp_path: Path) -> None:
    def event(name: str, submitted: float, started: float, finished: float, nbytes: int) -> dict:
        waits = {"waited_for_ranks_us": (started - submitted) * 1e3, "waited_for_turn_us": 0, "bytes": nbytes}
        times = {"ts": started * 1e3, "dur": (finished - started) * 1e3}
        return {"ph": "X", "cat": "all_reduce", "name": f"m/train_step/{name}", "pid": 0, "args": waits} | times

    events = [
        {"ph": "X", "cat": "step", "name": "step 0", "pid": 0, "ts": 0, "dur": 100e3},
        event("sum_0", 10, 10, 20, 300),  # hidden
        event("sum_1", 20, 25, 35, 100),  # half hidden
        event("sum_2", 30, 40, 45, 100),
        event("commit", 60, 70, 71, 4),  # not a gradient
    ]
    (tmp_path / "one.json").write_text(json.dumps(events))
    found = traffic(tmp_path / "one.json")
    assert found.communication == pytest.approx(0.025) and found.exposed == pytest.approx(0.010)
    assert found.waiting == pytest.approx(0.005)  # from 35 to 40 ms nothing ran
    assert found.lead == pytest.approx((300 * 20 + 100 * 10) / 500 * 1e-3)
    assert (found.wire, found.ready) == (pytest.approx(350 / 500), pytest.approx(400 / 500))
    (tmp_path / "none.json").write_text("[]")
    assert traffic(tmp_path / "none.json") == Traffic(0, 0, 0, 0, 0, 0, 0)
    assert union([(3, 5), (0, 2), (1, 2.5), (9, 8)]) == pytest.approx(4.5)
    assert union([(0, 10), (1, 2), (3, 12)]) == pytest.approx(12)


def test_prediction_adds_the_cost_model_to_one_devices_step() -> None:
    turns = {1: [[sample(0.1)]], 2: [[sample(0.1, Traffic(0.01, 0.01, 0, 0.0, 4e6, 0, 0))] * 2]}
    links = prediction.parse("hosts=3, devices=2, link=8Mb, inside=1GB, latency=0s")
    assert (links.hosts, links.devices, links.link, links.inside) == (3, 2, 1e6, 1e9)
    rows = prediction.predicted(plan(), rounds.summary(plan(), turns), links)
    assert [(row.hosts, row.ranks, row.batch) for row in rows] == [(1, 2, 20), (2, 4, 40), (3, 6, 60)]
    assert rows[0].step == pytest.approx(0.1 + 4e6 / 1e9)  # 2 ranks send 4 MB each at 1 GB/s
    # Two hosts send all 4 MB once at 1 MB/s; only the first block adds its time inside the host.
    assert rows[1].step == pytest.approx(0.1 + 4, rel=0.01) and rows[1].efficiency == pytest.approx(0.1 / rows[1].step)
    strong = prediction.predicted(plan(strong=True), rounds.summary(plan(strong=True), turns), links)
    assert strong[0].step == pytest.approx(0.05 + 4e6 / 1e9) and strong[0].efficiency == pytest.approx(0.05 / 0.054)
    hidden = {1: turns[1], 2: [[sample(0.1, Traffic(0.01, 0, 0, 0.05, 4e6, 1, 1))] * 2]}
    assert prediction.predicted(plan(), rounds.summary(plan(), hidden), links)[0].step == pytest.approx(0.1)


def test_network_rows_are_learnable_and_seeds_share_classes() -> None:
    for name in ("cnn", "lstm"):
        network = networks.NETWORKS[name]
        x, y = network.learnable_rows(400, 0)
        again, labels = network.learnable_rows(200, 1)
        if network.tokens:
            found = [np.bincount(row % networks.CLASSES).argmax() for row in again]
        else:
            means = np.stack([x[y == label].mean(0) for label in range(networks.CLASSES)])
            found = [((means - row) ** 2).reshape(networks.CLASSES, -1).sum(1).argmin() for row in again]
        assert np.mean(found == labels) > 0.9
        assert x.shape == network.rows(400)[0].shape and x.dtype == network.rows(1)[0].dtype


@pytest.mark.parametrize(
    "words, message",
    [
        (["--network", "cnn", "mine:subject"], "give either --network or MODULE:FUNCTION"),
        (["nowhere:subject"], "module:function with a module that can be imported. Received: 'nowhere:subject'"),
        (["mine"], "Received: 'mine'"),
        (["--ranks", "1,x"], "is not a list of numbers of ranks"),
        (["--ranks", "4", "--strong", "--batch", "3"], "at least one row per rank. Received: --batch 3 for 4 ranks"),
        (["--predict", "hosts=4"], "hosts=N,devices=N,link=SPEED"),
        (["--predict", "hosts=4,link=fast"], "Received: 'hosts=4,link=fast'"),
    ],
)
def test_bench_train_mistakes_are_reported_before_anything_starts(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from keras_ddl.cli import main

    monkeypatch.setattr(rounds, "run", lambda *_, **__: pytest.fail("a job was started"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "train", *words])
    messages = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and message in messages, messages


def test_host_slots_are_filled_host_by_host() -> None:
    assert rounds._part(None, 3) is None
    assert rounds._part("h0:2,h1:2", 3) == "h0:2,h1:1" and rounds._part("h0:2,h1", 2) == "h0:2"
    with pytest.raises(ConfigError, match="slots for all ranks"):
        rounds._part("h0:2,h1", 4)


def test_function_with_wrong_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_subject.py").write_text(SUBJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    subject.check("wrong_subject:wrong")
    with pytest.raises(
        ConfigError,
        match=r"\(model, data\) or \(model, data, validation\). Received: \(Sequential, tuple, tuple, int\)",
    ):
        subject.make("wrong_subject:wrong", 8, learnable=False)
    with pytest.raises(ConfigError, match="must have a function other"):
        subject.make("wrong_subject:other", 8, learnable=False)


@pytest.mark.long
@pytest.mark.parallel
@pytest.mark.parametrize("name", [name for name in networks.NETWORKS if name != "cnn"])
def test_every_network_is_measured_and_the_small_one_learns(name: str, tmp_path: Path) -> None:
    words = ["bench", "train", "--network", name, "--rounds", "1", "--steps", "3", "--strong", "--json", "out.json"]
    ended = run([*words, *(["--to-accuracy", "0.9"] if name == "lstm" else [])], tmp_path)
    assert ended.status == 0, ended
    rows = json.loads((tmp_path / "out.json").read_text())["measured"]
    assert rows[1]["batch"] == rows[0]["batch"] == 2 * networks.NETWORKS[name].batch
    assert name != "lstm" or all(row["reached"]["is_reached"] for row in rows), rows
