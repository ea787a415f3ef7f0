"""TF_CONFIG: a lone process of a cluster says how to start the job, and keras-ddl run --tf-config starts it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from harness.commands import keras_ddl
from launch.launching import Started, run, run_program, write_program

pytestmark = pytest.mark.parallel

PROGRAM = """
import json
import keras_ddl
keras_ddl.init()
task = json.loads(os.environ["TF_CONFIG"])["task"]
print(task["type"], task["index"], keras_ddl.rank(), keras_ddl.size(), *sys.argv[1:])
"""


def config_of(*workers: str, **others: list[str]) -> str:
    return json.dumps({"cluster": {"worker": workers, **others}, "task": {"type": "worker", "index": 0}})


def test_tf_config_without_a_launcher_names_the_command(tmp_path: Path):
    text = config_of("localhost:1", "localhost:2", evaluator=["localhost:3"])
    program, env = write_program(tmp_path, PROGRAM), {"TF_CONFIG": text}
    done = Started([program, "--note", "a b"], tmp_path, env=env, main=()).finish()
    assert done.status == 1 and done.out == "", done
    assert "ConfigError: TF_CONFIG names 2 tasks that train together" in done.err, done
    assert "Received: worker 0 on localhost without a launcher" in done.err, done
    assert "Left out: evaluator 0" in done.err and "Unset TF_CONFIG" in done.err, done
    command = shlex.split(re.search(r"^    (keras-ddl run .*)$", done.err, re.MULTILINE)[1])
    assert command[2:] == ["-np", "2", "python", "program.py", "--note", "a b"], command
    other = shlex.split(re.search(r"`(keras-ddl run --tf-config [^`]*)`", done.err)[1])
    ended = run(other[1:], tmp_path, env=env)
    assert ended.status == 0, ended
    assert sorted(ended.out.splitlines()) == ["[1] worker 1 1 2 --note a b", "worker 0 0 2 --note a b"], ended


def test_run_tf_config_takes_hosts_and_ranks_from_the_variable_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", config_of("h0:1", "h1:1", "h1:2", ps=["h7:1"]))
    shown = keras_ddl("run", "--dry-run", "--tf-config", "python", "there.py")
    assert "-np 3 " in shown and "--host h0:1,h1:2" in shown and "keras-ddl: Left out: ps 0 on h7" in shown, shown
    (tmp_path / "tf_config.json").write_text(config_of("localhost:1", "localhost:2"))
    (tmp_path / "job.toml").write_text('tf-config-file = "tf_config.json"')
    assert "-np 2 " in keras_ddl("run", "--dry-run", "--config", "job.toml", "true")


@pytest.mark.long
def test_run_does_not_pass_on_a_tf_config_with_other_tasks(tmp_path: Path):
    source, env = "print(os.environ.get('TF_CONFIG'))", {"TF_CONFIG": config_of("h0:1", "h1:1")}
    ended = run_program(tmp_path, source, np=3, env=env)
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["None", "[1] None", "[2] None"], ended
    assert "the ranks do not get TF_CONFIG: its number of training tasks differs" in ended.err, ended


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ("--tf-config", "", "--tf-config needs a cluster with a chief or workers"),
        ("--tf-config", "no json", "TF_CONFIG must be JSON"),
        ("--tf-config -np 3", config_of("h0:1", "h1:1"), "Received: np=3, hosts=None as well"),
        ("--tf-config --hosts h0:2", config_of("h0:1", "h1:1"), "Received: np=None, hosts='h0:2' as well"),
        ("--hosts-timeout 3", "", "hosts-timeout is a setting of --config FILE: write hosts-timeout = SECONDS there"),
    ],
)
def test_run_tf_config_mistake_is_one_clear_message(arguments: str, text: str, message: str, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    assert message in keras_ddl("run", *arguments.split(), "true", status=2)
