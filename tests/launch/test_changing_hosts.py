"""Changes of a running job's host file, tested without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keras_ddl.launch.hosts import parse_hosts
from keras_ddl.launch.hosts.host_plan import HostPlan
from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.regroup import changing_hosts
from keras_ddl.launch.regroup.changing_hosts import ChangingHosts


class Job:
    """The launcher's side of a job with two ranks on host a."""

    def __init__(self) -> None:
        self.links: list[Any] = []
        self.said: list[str] = []
        self.started: list[dict[str, Any]] = []
        self.leaving: list[int] = []
        membership = SimpleNamespace(members=(0, 1))
        regrouping: Any = SimpleNamespace(membership=membership, spares=[], ask_to_leave=self.ask_to_leave)
        self.hosts = ChangingHosts("/x/hosts", HostPlan(parse_hosts("a:2"), 2, 0, 1, None), regrouping, self, 10.0)
        for _ in range(2):
            self.add_link()

    def ask_to_leave(self, ranks: list[int], _: str) -> None:
        self.leaving = ranks

    def add_link(self) -> None:
        outcome = RankOutcome(len(self.links))
        ways = {"stop": lambda *_: None, "lose": lambda: None}
        self.links.append(SimpleNamespace(outcome=outcome, is_missing=True, channel=None, started=False, **ways))

    def count(self, link: Any) -> None:
        self.hosts.ended(link.outcome)

    def start_on_host(self, message: dict[str, Any]) -> None:
        self.started.append(message)

    def say(self, text: str) -> None:
        self.said.append(text)

    def change(self, hosts: str) -> None:
        assert self.hosts.differs(parse_hosts(hosts))
        self.hosts.notify(parse_hosts(hosts))
        assert not self.hosts.differs(parse_hosts(hosts))
        self.hosts.tick()


@pytest.fixture
def job() -> Job:
    return Job()


def test_ranks_are_started_and_asked_to_leave(job: Job) -> None:
    job.change("a:1,b:2")
    assert job.started == [{"host": "b", "first": 2, "local_ranks": [0, 1], "local_size": 2}] and job.leaving == [1]
    assert job.said == ["hosts has changed: a:1,b:2.", "ranks 2 to 3 started on host b and will join the others."]
    job.hosts.tick()
    assert len(job.started) == 1


def test_host_where_nothing_can_be_started_is_skipped(job: Job) -> None:
    job.change("a:2,b:1,c:1")
    job.hosts.not_started("b", "ssh ended with status 255")
    job.hosts.tick()
    assert [each["host"] for each in job.started] == ["b", "c"]
    assert job.said[-1] == "rank 2 ends before it has joined: ssh ended with status 255."


def test_host_that_never_connects_is_skipped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.change("a:2,b:2")
    now = changing_hosts.time.monotonic()
    monkeypatch.setattr(changing_hosts, "time", SimpleNamespace(monotonic=lambda: now + 11))
    job.hosts.tick()
    job.hosts.tick()
    assert len(job.started) == 1
    assert job.said[-2:] == [f"rank {n} ends before it has joined: it has not connected within 10 s." for n in (2, 3)]


def test_newcomers_without_a_slot_in_the_file_end(job: Job) -> None:
    job.change("a:2,b:1")
    job.change("a:2")
    assert job.said[-1] == "rank 2 ends before it has joined: no room for it in hosts."


def test_no_newcomer_is_started_after_one_has_failed(job: Job) -> None:
    job.change("a:2,b:1")
    job.hosts.connected(2)
    job.links[2].outcome.status = 1
    job.count(job.links[2])
    job.hosts.tick()
    assert len(job.started) == 1
    job.change("a:2,b:1,c:1")
    assert len(job.started) == 3


def test_refused_host_of_a_newcomer_is_skipped(job: Job) -> None:
    job.change("a:2,b:1")
    job.links[2].is_missing, closed = False, []
    job.links[2].channel = SimpleNamespace(close=lambda: closed.append(2))
    job.hosts.refuse(2, "versions of Keras")
    assert closed == [2] and job.said[-1] == "rank 2 ends before it has joined: versions of Keras."
    job.count(job.links[2])
    job.hosts.tick()
    assert len(job.started) == 1


def test_nothing_is_started_while_the_job_ends(job: Job) -> None:
    job.links[1].outcome.status = 0
    job.count(job.links[1])
    job.hosts.tick()
    job.change("a:2,b:1")
    assert job.started == []
