"""TF_CONFIG: a process that stands alone for a cluster says how to start it, and keras-ddl run --tf-config does."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.emulated_hosts import emulated_hosts
from launch.launching import LIMIT_SECONDS, environment, run, write_program

pytestmark = pytest.mark.parallel

PROGRAM = """
import json
import keras_ddl
keras_ddl.init()
task = json.loads(os.environ["TF_CONFIG"])["task"]
print(task["type"], task["index"], keras_ddl.rank(), keras_ddl.size(), *sys.argv[1:])
"""


def config_of(*workers: str, kind: str = "worker", **others: list[str]) -> str:
    return json.dumps({"cluster": {"worker": workers, **others}, "task": {"type": kind, "index": 0}})


def alone(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess:
    program = write_program(tmp_path, PROGRAM)
    env = environment("-", tmp_path, {"TF_CONFIG": text})
    command = [sys.executable, program, *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def test_tf_config_of_a_cluster_without_a_launcher_names_the_command_that_starts_it(tmp_path: Path):
    text = config_of("localhost:1", "localhost:2", evaluator=["localhost:3"])
    done = alone(tmp_path, text, "--note", "a b")
    assert done.returncode == 1 and done.stdout == "", done
    assert "ConfigError: TF_CONFIG names 2 tasks that train together" in done.stderr, done
    assert "Received: worker 0 on localhost without a launcher" in done.stderr, done
    assert "Left out: evaluator 0" in done.stderr and "Unset TF_CONFIG" in done.stderr, done
    command = shlex.split(re.search(r"^    (keras-ddl run .*)$", done.stderr, re.MULTILINE)[1])
    assert command[2:] == ["-np", "2", "python", "program.py", "--note", "a b"], command
    other = shlex.split(re.search(r"`(keras-ddl run --tf-config [^`]*)`", done.stderr)[1])
    for line in (command, other):
        ended = run(line[1:], tmp_path, env={"TF_CONFIG": text})
        assert ended.status == 0, ended
        assert sorted(ended.out.splitlines()) == ["[1] worker 1 1 2 --note a b", "worker 0 0 2 --note a b"], ended


def test_tf_config_of_several_hosts_names_them(tmp_path: Path):
    done = alone(tmp_path, config_of("h0:1", "h1:1", "h1:2", chief=["h0:9"], ps=["h7:1"], kind="chief"))
    assert "Received: chief 0 on h0 without a launcher" in done.stderr, done
    assert "    keras-ddl run --hosts h0:2,h1:2 python program.py\n" in done.stderr, done
    assert "Left out: ps 0 on h7" in done.stderr, done


@pytest.mark.parametrize("text", [config_of("h0:1"), config_of("h0:1", "h1:1", kind="evaluator")])
def test_tf_config_of_one_task_or_of_an_evaluator_works_without_a_launcher(tmp_path: Path, text: str):
    done = alone(tmp_path, text)
    assert done.returncode == 0, done
    assert done.stdout.split()[2:] == ["0", "1"], done


def test_run_tf_config_takes_hosts_and_ranks_from_the_variable_or_a_file(tmp_path: Path):
    several = config_of("h0:1", "h1:1", "h1:2", ps=["h7:1"])
    ended = run(["run", "--dry-run", "--tf-config", "python", "there.py"], tmp_path, env={"TF_CONFIG": several})
    assert ended.status == 0 and "-np 3 " in ended.out and "--host h0:1,h1:2" in ended.out, ended
    assert ended.err.startswith("keras-ddl: Left out: ps 0 on h7"), ended
    (tmp_path / "tf_config.json").write_text(config_of("localhost:1", "localhost:2"))
    program = write_program(tmp_path, "print(os.environ['TF_CONFIG'])")
    ended = run(["run", "--tf-config-file", "tf_config.json", "python", program], tmp_path, env={"TF_CONFIG": several})
    indices = [json.loads(line.removeprefix("[1] "))["task"]["index"] for line in ended.out.splitlines()]
    assert ended.status == 0 and sorted(indices) == [0, 1], ended


def test_run_does_not_hand_on_a_tf_config_of_other_tasks_than_ranks(tmp_path: Path):
    program = write_program(tmp_path, "print(os.environ.get('TF_CONFIG'))")
    ended = run(["run", "-np", "3", "python", program], tmp_path, env={"TF_CONFIG": config_of("h0:1", "h1:1")})
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["None", "[1] None", "[2] None"], ended
    assert "the ranks do not get TF_CONFIG: it does not name as many tasks" in ended.err, ended


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--tf-config"], "", "--tf-config needs a cluster with a chief or workers"),
        (["--tf-config"], "no json", "TF_CONFIG must be JSON"),
        (["--tf-config", "-np", "3"], config_of("h0:1", "h1:1"), "Received: np=3, hosts=None as well"),
        (["--tf-config", "--hosts", "h0:2"], config_of("h0:1", "h1:1"), "Received: np=None, hosts='h0:2' as well"),
        (["--tf-config-file", "nowhere.json"], "", "'nowhere.json' does not exist"),
    ],
)
def test_run_tf_config_mistake_is_one_clear_message(tmp_path: Path, arguments: list[str], text: str, message: str):
    ended = run(["run", *arguments, "true"], tmp_path, env={"TF_CONFIG": text})
    assert ended.status == 2 and ended.out == "" and "Traceback" not in ended.err, ended
    assert message in ended.err, ended


TRAINING = """
import json
import os
import socket

import keras
import numpy as np

import keras_ddl

strategy = keras_ddl.Strategy()
resolver = strategy.cluster_resolver
task = json.loads(os.environ["TF_CONFIG"])["task"]
assert (task["type"], task["index"]) == (resolver.task_type, resolver.task_id)
with strategy.scope():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.arange(8.0).reshape(4, 2) / 8
loss = model.fit(x, x[:, :1], batch_size=4, verbose=0).history["loss"][0]
print(socket.gethostname(), resolver.task_type, resolver.task_id, keras_ddl.num_hosts(), round(loss, 6))
"""


@pytest.mark.long
@pytest.mark.alone
def test_run_tf_config_trains_on_its_hosts(tmp_path: Path):
    write_program(tmp_path, TRAINING)
    cluster = {"chief": ["h1:2222"], "worker": ["h0:2222"], "evaluator": ["h1:2223"]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    with emulated_hosts(tmp_path, 2) as hosts:
        words = ("run", "--tf-config", "--mpi-arg", hosts.agent, "python", "program.py")
        shown = hosts.run("keras-ddl", *words, env={"TF_CONFIG": text})
    loss = ((np.arange(8.0).reshape(4, 2)[:, 1] / 8) ** 2).mean()
    assert sorted(shown.splitlines()) == [f"[1] h0 worker 0 2 {loss:.6f}", f"h1 chief 0 2 {loss:.6f}"], shown
