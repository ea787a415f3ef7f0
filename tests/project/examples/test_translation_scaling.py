"""The scaling studies of examples/translation: their arithmetic against hand-computed values, and their claims."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from examples.translation_parts import original, scaling, strong_scaling

from harness.examples import EXAMPLES, run
from harness.launching import python_path
from keras_ddl.cost_model import Dimension


def test_original_is_predicted_beside_published_figures():
    rows = original.table(original.Links())
    published = {row["ranks"]: row["step ms"] for row in rows if row["how"] == "published"}
    assert published == {1: 360, 2: 450, 4: 560, 8: 680, 12: 690, 16: 700}
    predicted = {(row["what"], row["ranks"]): row for row in rows if row["how"] == "predicted"}
    for (_, devices), row in predicted.items():
        assert row["error %"] == pytest.approx(100 * (row["step ms"] / published[devices] - 1))
        assert row["hosts"] == max(1, devices // 4)
    # By hand: 2 devices send all 717 MB once at 40 GB/s, 4 hosts 1.5 times at 12.5 GB/s, in parallel.
    assert predicted["original: links", 2]["step ms"] == pytest.approx(360 + 717 / 40, abs=0.1)
    assert predicted["original: links", 16]["step ms"] == pytest.approx(360 + 1.5 * 717 / 12.5, abs=1)
    # The study's claim: fitted to one host, it predicts several hosts; the other explanation does not.
    waiting, slower = (
        [abs(predicted[f"original: {what}", devices]["error %"]) for devices in (8, 12, 16)]
        for what in ("links, waiting", "slower inside hosts")
    )
    assert max(waiting) < 6 and min(slower) > 15


def test_measured_rows_have_predictions():
    def training(ranks, seconds):
        return SimpleNamespace(ranks=ranks, seconds=seconds, words=100.0 * ranks, gradient_bytes=8_000_000)

    here, emulated = {4: training(4, 0.5), 1: training(1, 0.2)}, {2: training(2, 0.3)}
    rows = scaling.table(here, emulated, Dimension(1, scaling.link_bandwidth("1gbit")), cores=2, copy=1e9)
    assert [(row["how"], row["ranks"], row["hosts"]) for row in rows] == [
        ("measured", 1, 1),
        ("measured", 4, 1),
        ("predicted", 4, 1),
        ("emulated", 2, 2),
        ("predicted", 2, 2),
    ]
    # 4 ranks on 2 cores take turns, and copy 8 MB 2.5 - 1/8 times, two at a time. 95 % of a link's rate is payload.
    expected = [200, 500, 2 * 200 + 8 * 2.375 * 2, 300, 200 + 8 / (125 * 0.95) * 1e3]
    assert [row["step ms"] for row in rows] == pytest.approx(expected, rel=0.01)
    words = [500, 800, 400e3 / expected[2], 2000 / 3, 200e3 / expected[4]]
    assert [row["words/s"] for row in rows] == pytest.approx(words, rel=0.01)
    assert [row["times one"] for row in rows][:2] == pytest.approx([1, 4 * 200 / 500])
    assert rows[2]["error %"] == pytest.approx(100 * (rows[2]["step ms"] / 500 - 1))


def test_strong_scaling_is_predicted_from_weak_scaling_alone():
    training = strong_scaling.Training()
    rows = strong_scaling.predictions(training, [16, 200, 256], 819_200, 5_000)
    found = {(row["what"], row["nodes"]): row for row in rows}
    # By hand: 300 nodes compute 20,000 tokens each, and take 1/0.91 of that time; the rest is overhead of any step.
    compute, rest = 819_200 / 200 / 1_100, 20_000 / 1_100 * (1 / 0.91 - 1)
    assert found["dense", 200]["step s"] == pytest.approx(compute + rest, rel=0.02)
    # 852 MB need 2.5 copies in a host of 2, longer than 2 (200-1)/200 times on the network in parallel.
    exchange = max(2.5 * 4 * 213e6 / 10e9, 2 * 199 / 200 * 4 * 213e6 / 12.5e9)
    assert found["dense, exchange", 200]["step s"] == pytest.approx(compute + exchange, rel=0.002)
    assert found["dense", 200]["tokens/process"] == 2048
    # The study's claim: near the published figures at any assumed computing rate; sparse gradients stop scaling.
    assert abs(found["dense", 200]["error %"]) < 10
    faster = strong_scaling.predictions(strong_scaling.Training(tokens_per_second=4_400), [16, 200], 819_200, 5_000)
    assert faster[3]["efficiency %"] == pytest.approx(found["dense", 200]["efficiency %"], abs=1)
    assert found["assumed sparse", 256]["times"] < found["assumed sparse", 200]["times"] < found["dense", 200]["times"]


@pytest.mark.parametrize("study", [scaling, strong_scaling])
def test_predictions_are_printed_written_and_drawn(study, tmp_path, capsys):
    words = ["--ranks", "--hosts"] if study is scaling else ["--nodes", "16", "200"]
    study.main([*words, "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["how"] for row in rows} == {"predicted", "published"}
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2
    with pytest.raises(SystemExit):
        study.main(["--plot", "rows.txt"])


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("model, ranks, hosts", [("lstm", [2], []), ("transformer", [], [2])])
def test_trainings_are_measured_and_emulated(model, ranks, hosts, tmp_path):
    words = ["--model", model, "--ranks", *ranks, "--hosts", *hosts, "--pairs", 60, "--tokens", 256]
    words += ["--rounds", 1, "--json", tmp_path / "rows.json", "--no-plot"]
    command = [sys.executable, "-m", "translation.studies.scaling", *words]
    shown = run(tmp_path, *command, env={"PYTHONPATH": python_path(EXAMPLES)})
    rows = json.loads((tmp_path / "rows.json").read_text())
    here = [row for row in rows if not row["what"].startswith("original")]
    expected = [("measured", 1)]
    if ranks:
        expected += [("measured", 2), ("predicted", 2)]
    elif "Nothing is emulated" not in shown:
        expected += [("emulated", 2), ("predicted", 2)]
    assert [(row["how"], row["ranks"]) for row in here] == expected, shown
    assert all(row["step ms"] > 0 and row["words/s"] > 0 for row in here)
    assert model in here[0]["note"] and "MB of gradients" in here[0]["note"]
