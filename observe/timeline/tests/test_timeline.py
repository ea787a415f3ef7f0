"""The timeline of several ranks: its format, the times of collectives, and buckets that overlap the backward pass."""

import json
import os

import pytest

from harness.rank_tests import run_ranks
from keras_ddl import timeline
from keras_ddl.timeline import steps

pytestmark = pytest.mark.parallel


def train():
    import numpy as np

    import keras_ddl
    from keras_ddl.compat.tensorflow import tf

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    os.environ["KERAS_DDL_BUCKET_BYTES"] = "1100000"
    strategy = keras_ddl.Strategy()
    import keras

    with strategy.scope():
        layers = [keras.layers.Dense(512, activation="relu") for _ in range(6)]
        model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    # The backward pass is long compared with the time slices of a busy machine.
    model.fit(np.ones((4096, 512), "float32"), np.ones((4096, 1), "float32"), batch_size=4096, epochs=6, verbose=0)


def test_collective_times_follow_from_its_waits():
    waits = {"bytes": 8, "waited_for_ranks_us": 1.5e6, "waited_for_turn_us": 0.5e6}
    event = {"ph": "X", "pid": 3, "cat": "all_reduce", "name": "a", "ts": 5e6, "dur": 2e6, "args": waits}
    assert timeline.collectives_of([event]) == [timeline.Collective(3, "all_reduce", "a", 8, 3.0, 4.5, 5.0, 7.0)]


@pytest.mark.alone
def test_timeline_shows_buckets_during_the_backward_pass(tmp_path):
    path = tmp_path / 'a "timeline".json'
    run_ranks(train, 2, env={"KERAS_DDL_TIMELINE": str(path)}).check()
    assert timeline.merge(path) == path
    events = json.loads(path.read_text(encoding="utf-8"))
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys() and event["ph"] in "MXbe"
        assert event["ph"] == "M" or event["ts"] > 0
        assert event["ph"] != "X" or event["dur"] >= 0
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["args"]["name"].split(" (")[0] for event in events if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }

    for rank in (0, 1):
        mine = timeline.read(timeline.path_of_rank(path, rank))
        spans = [event for event in mine if event.get("cat") == "step"]
        assert [step["name"] for step in spans] == ["step 0"] * 6
        sums = [one for one in timeline.collectives(timeline.path_of_rank(path, rank)) if "/train_step/" in one.name]
        buckets = [one for one in sums if one.bytes > 1024]  # the others are metrics
        assert {one.kind for one in buckets} == {"all_reduce"} and {one.rank for one in buckets} == {rank}
        weights = 6 * 4 * (6 * (512 * 512 + 512) + 513)
        assert weights <= sum(one.bytes for one in buckets) < 1.001 * weights
        early = []
        for step in spans:
            begin, end = step["ts"] * 1e-6, (step["ts"] + step["dur"]) * 1e-6
            now = [one for one in buckets if begin <= one.started <= end]
            assert len(now) == len(buckets) // 6 >= 5
            for one in now:
                assert begin <= one.submitted <= one.agreed <= one.started <= one.finished <= end
            early.append(sum(one.finished < max(other.submitted for other in now) for one in now))
        # The buckets of each step; other programs may disturb some steps.
        assert max(early) >= 3, early

    for each in steps.read(path):
        assert len(each.steps) == 6 and each.steps[0].number == 0
        for step in each.steps:
            assert step.begin < step.arrived < step.end == step.next, "each epoch has one step"
            # Communication during the backward pass is not exposed; the rest after it is.
            assert 0 < step.waiting < step.total and len(step.exposed) <= 2, step


def test_timeline_of_part_of_a_program_and_of_a_killed_process(tmp_path):
    def work(path):
        import keras_ddl
        from keras_ddl import timeline
        from keras_ddl.errors import ConfigError

        keras_ddl.init()
        keras_ddl.barrier("before")
        assert timeline.stop() is None and not timeline.is_on()
        own = timeline.start(path)
        try:
            timeline.start(path)
        except ConfigError as error:
            message = str(error)
        with timeline.span("both"):
            keras_ddl.barrier('in\\side "quoted"\n')
        assert timeline.stop() == own and timeline.stop() is None
        keras_ddl.barrier("after")
        names = [event["name"] for event in timeline.read(own) if event["ph"] == "X"]
        whole = own.read_text()
        own.write_text(whole[: len(whole) // 2])  # as a killed process leaves it
        return names, message, 0 < len(timeline.read(own)) < 8

    outcome = run_ranks(work, 2, args=(os.fspath(tmp_path / "t.json"),)).check()
    for rank in outcome.ranks:
        names, message, cut = rank.result
        assert names == ['barrier/in\\side "quoted"\n', "both"] and cut
        assert "already" in message


def test_unwritable_timeline_is_refused(tmp_path):
    def work(path):
        import keras_ddl

        try:
            keras_ddl.init()
        except keras_ddl.errors.ConfigError as error:
            return str(error)

    missing = str(tmp_path / "nowhere" / "t.json")
    outcome = run_ranks(work, 1, args=(missing,), env={"KERAS_DDL_TIMELINE": missing}).check()
    assert "nowhere/t.rank0.json: No such file" in outcome.ranks[0].result
