"""fit goes on when ranks are killed, and ends with the weights, history and predictions of one process."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_ddl.communicator.newcomers import history
from keras_ddl.errors import RankLostError
from keras_ddl.resilience import job, survival
from keras_ddl.state import replicate
from launch.launching import Ended, run, write_program

PROGRAM = str(Path(__file__).with_name("surviving_training.py"))
# How the launcher says that a rank was killed, of a rank and of a spare that was about to join.
LOST = r"rank \d+ (?:was lost|has not joined the others, which continue) \(killed by SIGKILL\)"
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


@cache
def of_one_process(program: str, model: str, data: str, epochs: int) -> list:
    environment = os.environ | {"EPOCHS": str(epochs)}
    command = [sys.executable, program, model, data]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(ended.stdout.splitlines()[-1])[2:]


def of_ranks(
    tmp_path: Path, ranks: int, program: str, *arguments: str, options: tuple[str, ...] = (), **env: str
) -> tuple[Ended, list[list]]:
    command = ["run", "-np", f"1:{ranks}", *options, "python", program, *arguments]
    ended = run(command, tmp_path, env=env)
    assert ended.status == 0, str(ended)
    return ended, printed(ended)


def printed(ended: Ended) -> list[list]:
    """Returns what the ranks have printed, in their order."""
    lines = [re.sub(r"^\[\d(, was \d)?\] ", "", line) for line in ended.out.splitlines()]
    return sorted(json.loads(line) for line in lines if line.startswith("["))


def check(
    tmp_path: Path,
    model: str,
    data: str,
    where: str,
    *killed: str,
    ranks: int = 3,
    spares: int = 0,
    epochs: int = 3,
    program: str = PROGRAM,
    options: tuple[str, ...] = (),
    **env: str,
) -> Ended:
    """`spares`: all of them join, or are killed while they do; they are numbered after the ranks. `options`, `env`: for
    keras-ddl run.
    """
    variables = {"EPOCHS": str(epochs)} | ({"AWAITED": str(ranks)} if spares else {}) | env
    numbers = ("--spares", str(spares)) if spares else ()
    arguments = (program, model, data, where, *killed)
    ended, _ = of_ranks(tmp_path, ranks, *arguments, options=(*numbers, *options), **variables)
    lost = {int(each.partition(":")[0]) for each in killed}
    assert len(re.findall(LOST, ended.err)) == len(lost), ended
    check_ended(ended, [rank for rank in range(ranks + spares) if rank not in lost], program, model, data, epochs)
    return ended


def check_ended(ended: Ended, ranks: list[int], program: str, model: str, data: str, epochs: int) -> None:
    """Compares what is left with one process. `ranks`: which are left, as the launcher counts them."""
    left = printed(ended)
    assert [each[0] for each in left] == ranks, ended
    assert [each[1] for each in left] == list(range(len(left))), ended
    history, weights, predicted = of_one_process(program, model, data, epochs)
    for _, _, seen, values, made in left:
        assert seen.keys() == history.keys()
        for name in history:
            np.testing.assert_allclose(seen[name], history[name], rtol=1e-12, err_msg=f"{name}\n{ended}")
        for one, other in zip(values, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-11)  # biases of keys have no gradient but noise
        np.testing.assert_allclose(made, predicted, rtol=1e-10, atol=1e-12)


def test_a_rank_is_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The one real death of `make test`; test_survival_model.py has all schedules, simulated."""
    check(tmp_path, "mlp", "arrays", "step", "1:7")


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    ended = check(tmp_path, "mlp", "arrays", "step", "1:7", spares=1, epochs=12)
    assert "spare rank 3 takes the place of rank 1." in ended.err
    assert (
        "rank 1 was lost (killed by SIGKILL); 2 ranks continue." in ended.err
        and "rank 3 has joined; 3 ranks continue." in ended.err
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "model", ["cnn", "lstm", "attention", "shards+accumulation", "eager", "compiled", "shards+two"]
)
def test_models(model: str, tmp_path: Path) -> None:
    check(tmp_path, model, "arrays", "step", "2:7")


@pytest.mark.long
def test_a_rank_that_has_not_committed_gets_all_that_the_step_has_written(tmp_path: Path) -> None:
    check(tmp_path, "teacher+behind", "arrays", "committed", "1:5")


@pytest.mark.long
@pytest.mark.parametrize("moment", ["step 2:7", "step 1:4 0:9"])
def test_eager_steps_are_undone_outside_of_the_model_too(moment: str, tmp_path: Path) -> None:
    check(tmp_path, "eager+teacher", "arrays", *moment.split())


@pytest.mark.long
@pytest.mark.parametrize("killed", ["1:0", "2:11", "1:3 2:20"])
def test_a_rank_is_killed_while_shards_are_gathered_to_be_saved(killed: str, tmp_path: Path) -> None:
    check(tmp_path, "shards+saving", "arrays", "gather", *killed.split())


@pytest.mark.long
def test_a_rank_and_the_one_with_its_mirrors_are_killed_together(tmp_path: Path) -> None:
    killed = ["between", "1:5", "2:5"]
    ended = run(["run", "-np", "1:4", "python", PROGRAM, "shards", "arrays", *killed], tmp_path)
    assert ended.status == 137, ended
    assert "were lost together" in ended.err and "--restarts" in ended.err, ended


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "moment"),
    [
        *(
            ("mlp", each)
            for each in ("between 1:0", "between 2:6", "test 1:5", "epoch 1:1", "step 1:0", "step 1:4 2:4")
        ),
        *(
            ("shards", each)
            for each in ("between 1:6", "test 1:5", "epoch 1:1", "step 1:0", "step 2:4 1:9", "step 0:7")
        ),
        *(("weights", each) for each in ("step 1:7", "step 2:4 1:9", "epoch 0:1", "test 1:5")),
        *(("weights+tables", each) for each in ("step 1:7", "step 0:4 1:9", "test 2:5")),
        ("weights+tables+accumulation", "step 1:7"),
    ],
)
def test_moments(model: str, moment: str, tmp_path: Path) -> None:
    """With optimizers or weights in shards the others go on from their mirrors."""
    check(tmp_path, model, "dataset", *moment.split())


@pytest.mark.long
def test_all_but_one_are_killed_one_after_the_other(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "3:2", "1:6", "2:11", ranks=4)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("data", ["dataset", "open", "sequence", "generator", "several"])
def test_data(data: str, rank: int, tmp_path: Path) -> None:
    check(tmp_path, "mlp", data, "step", f"{rank}:7")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("model", "data", "span_ms"),
    [("mlp", "arrays", 150), ("cnn", "arrays", 150), ("lstm", "several", 300), ("attention", "sequence", 200)],
)
def test_two_of_three_are_killed_at_random_moments(
    model: str, data: str, span_ms: int, seed: int, tmp_path: Path
) -> None:
    """At moments of their own, at the same one, or the second while the other one goes on. `span_ms`: of a training."""
    rng = random.Random(f"{model} {data} {seed}")
    first, second = rng.sample(range(3), 2)
    moment = rng.randrange(span_ms)
    apart, recovering = f"{second}:{rng.randrange(span_ms)}", f"{second}:{rng.randrange(60)}:recovery"
    check(tmp_path, model, data, "moment", f"{first}:{moment}", rng.choice([apart, f"{second}:{moment}", recovering]))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("model", "data"), [("shards", "arrays"), ("weights", "dataset")])
def test_one_of_three_with_shards_is_killed_at_a_random_moment(
    model: str, data: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{model} {data} {seed}")
    check(tmp_path, model, data, "moment", f"{rng.randrange(3)}:{rng.randrange(200)}")


DRIFTED = """
import os, signal
import keras, numpy as np
import keras_ddl
os.environ["KERAS_DDL_DRIFT_CHECK_PERCENT"] = "1e-6"
strategy = keras_ddl.Strategy(seed=3)
me = strategy.rank
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Ends(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 12 and me == 2:
            model.layers[0].bias.assign([7.0])
        elif batch == 12 and me == 0:
            os.kill(os.getpid(), signal.SIGKILL)

x = np.ones((200, 2))
try:
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[Ends()])
except keras_ddl.errors.DriftError as error:
    assert "after step 12" in str(error) and "bias on rank 1 differs from rank 0" in str(error), error
    print("told", flush=True)
"""


@pytest.mark.long
def test_ranks_that_differ_after_a_loss_are_told_before_the_next_step(tmp_path: Path) -> None:
    ended = run(["run", "-np", "1:3", "python", write_program(tmp_path, DRIFTED)], tmp_path)
    assert ended.status == 0 and ended.out.count("told") == 2, ended


def test_a_state_that_came_in_part_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that gives it dies meanwhile: no real one can be made to, between two variables."""
    variables = [tf.Variable(1.0), tf.Variable(2.0)]

    def broadcast(given: list[tf.Variable], root: int) -> None:
        given[0].assign(10.0)
        raise RankLostError("rank 1 died")

    monkeypatch.setattr(survival.history, "_recover", None)
    monkeypatch.setattr(survival.communicator, "rank", lambda: 0)
    monkeypatch.setattr(survival.communicator, "topology", lambda: None)
    monkeypatch.setattr(replicate.ops, "broadcast_variables", broadcast)
    behind = survival.Survival()
    with pytest.raises(RankLostError):
        behind._catch_up([survival.Report(0, 0), survival.Report(1, 1)], lambda: variables, None)
    assert [float(each) for each in variables] == [1.0, 2.0]


def test_a_job_after_shutdown_has_its_own_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("topology", lambda: None), ("epoch", lambda: 0), ("rank", lambda: 0)):
        monkeypatch.setattr(survival.communicator, name, value)
    monkeypatch.setattr(history, "_recover", None)
    monkeypatch.setattr(history, "_of_job", None)
    monkeypatch.setattr(job, "_of_job", [])
    jobs = []
    for record in (history.Record(None, [], 0), history.Record(None, [], 0)):  # type: ignore[arg-type]
        history.begin(record)
        jobs.append(job.of_job())
        assert job.of_job() is jobs[-1] and jobs[-1].joining._record is record
        history.end()  # as keras_ddl.shutdown() does
    assert jobs[0] is not jobs[1] and history.current() is None


TWO_JOBS = """
import os, signal
import keras, numpy as np
import keras_ddl
from keras_ddl import communicator

class Ends(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if (number, batch, strategy.rank) == (1, 2, 1):
            os.kill(os.getpid(), signal.SIGKILL)

x, jobs = np.ones((24, 2)), []
for number in range(2):
    strategy = keras_ddl.Strategy(seed=3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[Ends()])
    jobs.append(strategy.resilience)
    print("trained", number, communicator.size(), flush=True)
    keras_ddl.shutdown()
assert jobs[0] is not jobs[1]
"""


@pytest.mark.long
def test_the_second_job_of_processes_goes_on_without_a_lost_rank(tmp_path: Path) -> None:
    ended = run(["run", "-np", "1:2", "python", write_program(tmp_path, TWO_JOBS)], tmp_path)
    assert ended.status == 0 and ended.out.count("trained 0 2") == 2 and ended.out.count("trained 1 1") == 1, ended
