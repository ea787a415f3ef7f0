"""TF_CONFIG as TensorFlow documents it, and the command that starts its cluster."""

import json
import socket

import pytest

from keras_ddl.errors import ConfigError
from keras_ddl.topology import tf_config


def config_of(cluster, kind="worker", index=0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


CLUSTERS = {
    "tasks that share hosts": ({"worker": ["h0:1", "h1:1", "h0:2", "h1:2"]}, "--hosts h0:2,h1:2"),
    "a chief": ({"worker": ["h0:1", "h1:1"], "chief": ["h1:2"]}, "--hosts h1:2,h0:1"),
    "this host": ({"worker": ["localhost:1", "127.0.0.1:2", "[::1]:3"]}, "-np 3"),
    "this host by name": ({"chief": [f"{socket.gethostname()}:1"], "worker": [f"{socket.gethostname()}:2"]}, "-np 2"),
    "one other host": ({"worker": ["h0:1", "h0:2"]}, "--hosts h0:2"),
    "workers by index": ({"worker": {"3": "h0:1", "1": "h1:1"}}, "--hosts h1:1,h0:1"),
    "without ports": ({"worker": ["10.0.0.1", "10.0.0.2"]}, "--hosts 10.0.0.1:1,10.0.0.2:1"),
    "others beside": ({"worker": ["h0:1", "h1:1"], "ps": ["h2:1"], "evaluator": ["h3:1"]}, "--hosts h0:1,h1:1"),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_command_starts_a_rank_for_each_task_that_trains(name):
    cluster, where = CLUSTERS[name]
    parsed = tf_config.parse(config_of(cluster))
    assert parsed.command(["python", "train.py", "--note", "a b"]) == (
        f"keras-ddl run {where} python train.py --note 'a b'"
    )


def test_tasks_follow_the_order_of_hosts_and_the_chief_is_rank_0():
    text = config_of({"worker": ["h0:1", "h1:1", "h2:1"], "chief": ["h1:2"]}, "worker", 2)
    ranks = [json.loads(tf_config.for_rank(text, rank, 4)) for rank in range(4)]
    assert [(each["task"]["type"], each["task"]["index"]) for each in ranks] == [
        ("chief", 0),
        ("worker", 1),  # also on h1
        ("worker", 0),
        ("worker", 2),
    ]
    assert all(each["cluster"] == json.loads(text)["cluster"] for each in ranks)
    assert tf_config.for_rank(text, 0, 2) is None
    for no_cluster in ("", "{}", "no json", '{"task": {"type": "worker", "index": 1}}'):
        assert tf_config.for_rank(no_cluster, 1, 2) == no_cluster


def test_omitted_tasks_are_named():
    parsed = tf_config.parse(config_of({"worker": ["h0:1"], "ps": ["h2:1", "h3:1"], "evaluator": ["h4:1"]}))
    text = parsed.left_out_text()
    assert "evaluator 0 on h4" in text and "ps 0 on h2, ps 1 on h3" in text
    assert tf_config.parse(config_of({"worker": ["h0:1"]})).left_out_text() == ""


WRONG = [
    "no json",
    "[]",
    '{"cluster": []}',
    '{"cluster": {"worker": "h0:1"}}',
    '{"cluster": {"worker": [1]}}',
    '{"cluster": {"chief": ["h0:1", "h1:1"]}}',
    '{"task": {"type": "worker", "index": "first"}}',
]


@pytest.mark.parametrize("text", WRONG)
def test_invalid_tf_config_is_an_error(text):
    with pytest.raises(ConfigError, match="TF_CONFIG must be JSON"):
        tf_config.parse(text)


@pytest.mark.parametrize("text", [None, "", " ", "{}", '{"cluster": {}}', config_of({"worker": ["h0:1"]})])
def test_at_most_one_task_may_run_alone(text, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    tf_config.check_not_one_of_a_cluster()


def test_only_an_evaluator_may_run_alone(monkeypatch):
    cluster = {"worker": ["h0:1", "h1:1"], "ps": ["h2:1"]}
    monkeypatch.setenv("TF_CONFIG", config_of(cluster, "evaluator"))
    tf_config.check_not_one_of_a_cluster()
    for kind, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        monkeypatch.setenv("TF_CONFIG", config_of(cluster, kind, index))
        with pytest.raises(ConfigError, match=rf"Received: {kind} {index} on h\d without a launcher"):
            tf_config.check_not_one_of_a_cluster()
