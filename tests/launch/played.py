"""Simulated ranks: the launcher runs in the tests' process, and each test lists the events of its ranks.

Only the processes are simulated. The launcher listens on its socket; each simulated rank proves that it knows the job's
token, waits for the start message, and sends frames like its wrapper (rank_process.py). The launcher's loop polls the
starter again and again, and each poll triggers one event of the list.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keras_ddl.config import Seconds
from keras_ddl.launch import address as address_module
from keras_ddl.launch import job as job_module
from keras_ddl.launch import outcome, restarts, supervisor
from keras_ddl.launch.address import Address
from keras_ddl.launch.job import JobResult
from keras_ddl.launch.output.screen import Screen
from keras_ddl.launch.restarts import RestartLoop
from keras_ddl.launch.watchers import Watchers
from keras_ddl.link.channel import Channel
from keras_ddl.link.handshake import sign, verify
from keras_ddl.link.kinds import FROM_UNPROVEN_LISTENER, Kind
from launch.screens import Recorder

LIMIT_SECONDS = 120
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
Event = Callable[["Play"], bool | None]  # True or False: whether its condition holds; None: it has acted


class PlayedRank:
    """The simulated wrapper of one rank."""

    def __init__(self, number: int, size: int, address: Address) -> None:
        self.number, self.is_started, self.is_over = number, False, False
        self.orders: list[tuple[str, Any]] = []  # kinds and contents of the received frames
        self.channel = Channel(address_module.connect(address), FROM_UNPROVEN_LISTENER)
        self._token, self._size = address.token, size

    def hear(self, is_stubborn: bool) -> None:
        for kind, payload in () if self.channel.closed else self.channel.read():
            if kind is Kind.NONCE:
                hello = {"nonce": "00" * 32, "rank": self.number, "size": self._size, "host": "h", "pid": 1}
                self.channel.accept_all()
                self.channel.send(Kind.HELLO, sign(self._token, "caller", payload, hello))
            elif kind is Kind.WELCOME:
                self.orders.append(("WELCOME", verify(self._token, "listener", bytes(32), payload)))
            else:
                self.orders.append((kind.name, json.loads(payload) if payload[:1] == b"{" else payload))
                self.is_started |= kind is Kind.START
            if kind is Kind.START:
                self.channel.send(Kind.STARTED, {"pid": 100 + self.number})
            if kind is Kind.STOP and not self.is_over and not is_stubborn:
                signum = json.loads(payload)["signal"]
                self.exit(-signum, "the launcher")

    def exit(
        self,
        status: int,
        stopped_by: str | None = None,
        report: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        in_job: bool = False,
    ) -> None:
        """Ends the rank, after its program has sent the given messages."""
        self.is_over = True
        if report is not None:
            self.channel.send(Kind.REPORT, report)
        if checkpoint is not None:
            self.channel.send(Kind.CHECKPOINT, {**checkpoint, "is_new": True})
        self.channel.send(Kind.IN_JOB, {"in_job": in_job})
        self.channel.send(Kind.EXIT, {"status": status, "stopped_by": stopped_by})

    def received(self, kind: Kind) -> list[Any]:
        """Returns the contents of the received frames of this kind."""
        return [content for name, content in self.orders if name == kind.name]


class Play:
    """One attempt of a job, which replaces StarterProcess: its ranks, and the remaining events."""

    def __init__(self, events: Sequence[Event], environment: dict[str, str], num_ranks: int, spares: int) -> None:
        self._events, self._limit = list(events), time.monotonic() + LIMIT_SECONDS
        address = Address.parse(environment["KERAS_DDL_LAUNCHER"])
        self.ranks = [PlayedRank(number, num_ranks, address) for number in range(num_ranks + spares)]
        self._stray = PlayedRank(0, num_ranks + 1, address)  # believes that the job has another size
        self.stubborn: set[int] = set()  # ranks that ignore the order to end
        self._poll = select.epoll()
        for each in self.ranks:
            self._poll.register(each.channel.fileno(), select.EPOLLIN)
        self.orders, self.silent, self.ended_at, self.status, self.text = (
            None,
            False,
            None,
            None,
            "",
        )  # as in StarterProcess

    def fileno(self) -> int:
        return self._poll.fileno()

    def read(self) -> bytes:
        return b""

    def poll(self) -> int | None:
        assert time.monotonic() < self._limit, f"the job does not end; left: {self._events}"
        for each in (self._stray, *self.ranks):
            each.hear(each.number in self.stubborn)
        while self._events and all(each.is_started for each in self.ranks):
            happens = self._events[0](self)
            if happens is not False:
                self._events.pop(0)
            if happens is not True:  # lets the launcher notice before the next event
                break
        return self.status

    def die(self, status: int) -> None:
        self.status, self.ended_at = status, time.monotonic()

    def end(self, seconds: float, serve: Callable[[], None], is_killed: Callable[[], bool]) -> None:
        """Ends when the wrappers have been allowed to leave."""
        deadline = time.monotonic() + seconds
        while not all(each.received(Kind.BYE) or each.channel.closed for each in self.ranks):
            if is_killed() or time.monotonic() > deadline:
                break
            serve()
        self.wait()

    def signal(self, signum: int) -> None:
        pass

    def wait(self) -> None:
        if self.ended_at is None:
            self.die(0)
        assert not self._stray.orders
        for each in (self._stray, *self.ranks):
            each.channel.close()
        self._poll.close()
        self.silent = True


# ---- events ----------------------------------------------------------------------------------------------------------


def says(rank: int, text: str, stream: Kind = Kind.ERR) -> Event:
    return lambda play: play.ranks[rank].channel.send(stream, text.encode())


def exits(rank: int, status: int, **more: Any) -> Event:
    return lambda play: play.ranks[rank].exit(status, **more)


def fails(rank: int, error: str, status: int = 1, **report: Any) -> Event:
    """The rank's program ends with an exception that keras_ddl reported. lost: the ranks that a collective missed."""
    text = f"Traceback (most recent call last):\n  File x\n{error}\n"
    return exits(rank, status, report={"type": error, "summary": error, "traceback": text, **report})


def misses(rank: int, *others: int) -> Event:
    return fails(rank, f"RankLostError: rank {others[0]} is gone", lost={"ranks": list(others)})


def vanishes(rank: int) -> Event:
    """The rank's wrapper is killed, or its host is lost."""

    def event(play: Play) -> None:
        play.ranks[rank].is_over = True
        play.ranks[rank].channel.close()

    return event


def asks(rank: int, **question: Any) -> Event:
    return lambda play: play.ranks[rank].channel.send(Kind.QUESTION, question)


def waits(rank: int, *others: int) -> Event:
    """The rank's program waits for others to meet it."""
    return lambda play: play.ranks[rank].channel.send(Kind.WAITS, {"ranks": others})


def gets(signum: int) -> Event:
    """The launcher gets a signal."""
    return lambda play: os.kill(os.getpid(), signum)


def until(rank: int, kind: Kind, times: int = 1) -> Event:
    """Waits until the launcher has sent a rank `times` frames of a kind."""
    return lambda play: len(play.ranks[rank].received(kind)) >= times


def dies(status: int) -> Event:
    return lambda play: play.die(status)


def stubborn(*ranks: int) -> Event:
    return lambda play: play.stubborn.update(ranks)


# ---- jobs ------------------------------------------------------------------------------------------------------------


class EventRecorder:
    """A watcher that keeps a job's events, in the form of the lines of --events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        self.events.append(json.loads(json.dumps({"event": name, **fields})))

    def figures(self, rank: int, figures: Mapping[str, Any]) -> None:
        pass


@dataclass
class Played:
    """How a job ended, with its launcher's output and orders."""

    result: JobResult
    out: str
    err: str
    events: list[dict[str, Any]]
    plays: list[Play] = field(repr=False)

    @property
    def status(self) -> int:
        return self.result.exit_status

    def orders(self, rank: int, kind: Kind) -> list[Any]:
        """Returns the orders that a rank of the last attempt received."""
        return self.plays[-1].ranks[rank].received(kind)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]


class Stage:
    """Plays jobs whose launcher has short timeouts, because what it waits for does not come."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        for module, name in (
            (Seconds, "GRACE"),
            (Seconds, "STARTER_END"),
            (outcome, "_CASCADE_SECONDS"),
            (outcome, "_CASCADE_WITHOUT_MPI_SECONDS"),
            (outcome, "_CASCADE_OF_RESTART_SECONDS"),
        ):
            patch.setattr(module, name, 0.05)
        patch.setattr(restarts, "_POLL_HOSTS_SECONDS", 0.02)
        patch.setenv("TMPDIR", str(folder))

    def play(
        self, *attempts: Sequence[Event], ranks: int = 2, loop: dict[str, Any] | None = None, **job: Any
    ) -> Played:
        """Runs a job. attempts: the events of each attempt. loop, job: arguments of RestartLoop and job.make."""
        made = job_module.make(["program"], num_ranks=ranks, **job)
        left, plays = list(attempts), list[Play]()

        def start(command: list[str], environment: dict[str, str], *_: Any, **__: Any) -> Play:
            assert left, f"another attempt: {command}"
            size = int(command[command.index("-np") + 1])
            plays.append(Play(left.pop(0), environment, size, made.spares))
            return plays[-1]

        self._patch.setattr(supervisor, "StarterProcess", start)
        out, err = Recorder(), Recorder()
        noted = EventRecorder()
        watchers = Watchers([noted])
        result = RestartLoop(made, Screen(out, err), watchers=watchers, **(loop or {})).run(SIGNALS)
        assert not left, f"no attempt for {left}"
        text = err.data.decode() + result.failure_text
        return Played(result, out.data.decode(), text, noted.events, plays)
