"""Comparing recordings: distances, what rounding allows, and where the first difference is."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_recordings import EPSILON, Made, training

from keras_ddl.verify import compare
from keras_ddl.verify.recording import FULL_ENTRIES, SKETCH_ENTRIES, Event, Plan, Recording, Writer, sketch


@pytest.mark.parametrize(
    ("ranks", "bits", "epsilons", "expected"),
    [
        (1e-9, {"change": 1e-10}, [EPSILON], "equal"),
        (1e-9, {"change": 1e-13}, [EPSILON], "different"),
        (1e-9, None, [EPSILON], "different"),
        (1e-9, {"change": 1e-10, "at": 1}, [EPSILON], "equal"),  # the second step shows it
        (5e-2, {}, [2.0**-23, 2.0**-7], "equal"),  # rounding of what layers compute in
        (5e-2, {}, [2.0**-23, 2.0**-10], "different"),
    ],
)
def test_judge_allows_what_one_process_differs_from_itself(
    ranks: float, bits: dict[str, Any] | None, epsilons: list[float], expected: str
) -> None:
    perturbed = None if bits is None else Made(training(**bits))
    assert compare.judge(Made(training()), Made(training(change=ranks)), perturbed, *epsilons).verdict == expected


def test_judge_ends_where_rounding_hides_everything() -> None:
    ranks = Made(training(change=5.0, at=3))
    found = compare.judge(Made(training()), ranks, Made(training(change=1e-2, at=2)), EPSILON)
    assert (found.verdict, found.steps, found.useless_from.step) == ("equal", 2, 3)
    nothing = compare.judge(Made(training()), ranks, Made(training(change=1.0)), EPSILON)
    assert (nothing.verdict, nothing.steps) == ("unknown", 0)


@pytest.mark.parametrize("name", ["returned accuracy", "momentum"])
def test_what_jumps_loosens_no_limit_of_the_weights(name: str) -> None:
    """A row changes its class when the weights are perturbed: a wrong weight must be seen all the same."""
    one, bits, ranks = training(), training(change=1e-15), training(change=0.5, at=2)
    for steps, value in ((one, 0.5), (bits, 0.5 - 1 / 64), (ranks, 0.5)):
        for arrays in steps:
            arrays[name] = np.float64(value)
    found = compare.judge(Made(one), Made(ranks), Made(bits), EPSILON)
    assert (found.verdict, found.first_beyond.event.step) == ("different", 3)
    assert [each for each, _ in found.first_beyond.beyond] == ["w1"]
    assert found.hidden == [name]


def test_a_row_that_flips_on_the_ranks_is_reported() -> None:
    one, ranks = training(), training()
    for number, (ours, theirs) in enumerate(zip(one, ranks)):
        ours["returned accuracy"] = np.float64(0.5)
        theirs["returned accuracy"] = np.float64(0.5 + (number == 1) / 64)
    found = compare.judge(Made(one), Made(ranks), Made(one), 2.0**-23)
    assert (found.verdict, found.steps, list(found.flips)) == ("equal", 4, ["returned accuracy"])
    in_float64 = compare.judge(Made(one), Made(ranks), Made(one), EPSILON)
    assert [name for name, _ in in_float64.first_beyond.beyond] == ["returned accuracy"]
    ranks[1]["w1"] = ranks[1]["w1"] + 1e-3
    both = compare.judge(Made(one), Made(ranks), Made(one), 2.0**-23)
    assert [name for name, _ in both.first_beyond.beyond] == ["returned accuracy", "w1"]


def test_judge_of_runs_that_do_different_things() -> None:
    one, other = Made(training(), ["a", "a", "b", "a"]), Made(training(), ["a", "a", "c", "a"])
    found = compare.judge(one, other, one, EPSILON)
    assert found.verdict == "different"
    assert found.first_beyond.ranks.apart == "training step of c instead of training step of b"


def test_integers_must_be_equal_and_names_the_same() -> None:
    one, other = training(), training()
    other[1]["iterations"] = np.int64(7)
    found = compare.judge(Made(one), Made(other), Made(one), EPSILON)
    assert found.first_beyond.beyond == [("iterations", math.inf)]
    del other[0]["w2"]
    assert compare.judge(Made(one), Made(other), Made(one), EPSILON).first_beyond.beyond == [("w2", math.inf)]


def test_what_is_zero_but_for_rounding_is_measured_by_others_of_its_kind() -> None:
    one = [{"w1": np.ones(4), "w_bias": np.full(2, 1e-17)}]
    other = [{"w1": np.ones(4), "w_bias": np.full(2, -3e-17)}]
    assert compare.judge(Made(one), Made(other), Made(one), EPSILON).verdict == "equal"
    alone = [{"v": np.full(2, 1e-17)}], [{"v": np.full(2, -3e-17)}]
    assert compare.judge(Made(alone[0]), Made(alone[1]), Made(alone[0]), EPSILON).verdict == "different"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], 0.0),
        ([1.0, np.nan], [1.0, 2.0], math.inf),
        ([np.inf], [-np.inf], math.inf),
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_distance_of_special_values(one: list[float], other: list[float], expected: float) -> None:
    assert compare.distance(np.array(one), np.array(other), 2.0) == expected


def test_first_difference_of_two_runs() -> None:
    one = Made(training())
    assert compare.first_difference(one, Made(training(change=1e-3, at=1)), EPSILON).event.step == 2
    shorter = compare.first_difference(one, Made(training(2)), EPSILON)
    assert (shorter.event.step, shorter.apart) == (2, "how much is recorded: 4 and 2 events")


def test_recording_returns_what_was_written(tmp_path: Path) -> None:
    Plan(3, "float64", 5, True).write(tmp_path)
    assert Plan.read(tmp_path) == Plan(3, "float64", 5, True)
    arrays = {"a/kernel": np.arange(6.0).reshape(2, 3), "count": np.int64(3), "empty": np.zeros(0, np.float32)}
    for rank in range(3):
        writer = Writer(tmp_path, rank)
        for step in (1, 2):
            changed = {**arrays, "count": np.int64(4)} if (rank, step) == (2, 2) else arrays
            writer.add(Event(0, "step", "m", step, {"a/kernel": "weights"}), changed)
        writer.facts({"rank": rank})
    read = Recording(tmp_path)
    assert (read.steps, read.facts, [each.number for each in read.events]) == (2, {"rank": 0}, [0, 1])
    assert read.ranks_differ(3) == "rank 2 after step 2 (training step of m)"
    for name, each in read.arrays(read.events[1]).items():
        np.testing.assert_array_equal(each, arrays[name])
        assert each.dtype == arrays[name].dtype
    with (tmp_path / "rank-0" / "events.jsonl").open("a") as file:
        file.write('{"number": 2, "ki')  # killed while it wrote
    assert len(Recording(tmp_path).events) == 2
    lines = (tmp_path / "rank-1" / "events.jsonl").read_text().splitlines()
    (tmp_path / "rank-1" / "events.jsonl").write_text(lines[0])
    shutil.rmtree(tmp_path / "rank-2")
    assert Recording(tmp_path).ranks_differ(3) == "rank 1 recorded 1 events, rank 0 2"
    (tmp_path / "rank-1" / "events.jsonl").write_text("\n".join(lines))
    assert Recording(tmp_path).ranks_differ(3) == "only 2 of 3 ranks recorded anything"
    assert Recording(tmp_path).ranks_differ(2) == ""


def test_sketch_shows_a_difference_in_any_entry() -> None:
    values = np.random.default_rng(1).normal(size=10 * SKETCH_ENTRIES + 7)
    one, rows = sketch(values)
    assert (one.size, rows) == (SKETCH_ENTRIES, 11)
    for place in (0, 5 * SKETCH_ENTRIES + 3, values.size - 1):
        changed = values.copy()
        changed[place] += 1e-6
        assert np.max(np.abs(sketch(changed)[0] - one)) == pytest.approx(1e-6, rel=1e-6)
    assert sketch(values[:SKETCH_ENTRIES])[1] == 1


def test_large_events_are_stored_as_sketches(tmp_path: Path) -> None:
    made = []
    for name, entry in (("a", 1.0), ("b", 1.5)):
        large = np.ones(FULL_ENTRIES + 1, np.float32)
        large[77] = entry
        Writer(tmp_path / name, 0).add(Event(0, "step", "m", 1), {"w": large, "b": np.ones(3)})
        made.append(Recording(tmp_path / name))
    one, other = made
    assert one.arrays(one.events[0])["w"].size == SKETCH_ENTRIES
    found = compare.judge(one, other, one, 2.0**-23)
    assert [name for name, _ in found.first_beyond.beyond] == ["w"]
