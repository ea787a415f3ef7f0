"""The connection of a rank's program with its wrapper, in one process."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from link.wrappers import OF_JOB, Wrapper, served

from harness.waiting import eventually
from keras_ddl.communicator.reporting import error_report
from keras_ddl.launch.rank.program_link import WrapperLink
from keras_ddl.link import program
from keras_ddl.link.kinds import FROM_PROGRAM, Kind


class Launcher:
    """Notes what it hears, and answers questions with what they ask."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[tuple[Kind, Any]] = []
        self.answers = True
        self.wrapper = Wrapper(folder, self.hear)

    def hear(self, kind: Kind, payload: bytes) -> None:
        self.heard.append((kind, json.loads(payload) if payload[:1] == b"{" else payload))
        if kind is Kind.QUESTION and self.answers:
            self.wrapper.send(Kind.ANSWER, payload)

    def hears(self, *frames: tuple[Kind, Any]) -> bool:
        return eventually(lambda: self.heard == list(frames))


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.wrapper.end()


@pytest.fixture
def linked(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[program.ProgramLink]:
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(program, "_link", None)
    link = program.current()
    assert link is not None
    yield link


def test_a_program_without_a_launcher_has_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_link", None)
    for folder in ("", str(tmp_path)):  # not set, or set by a test
        monkeypatch.setenv("KERAS_DDL_RUN_DIR", folder)
        assert program.current() is None
        program.tell(Kind.IN_JOB, {"in_job": True})


def test_a_program_learns_of_its_job_and_of_what_changes(launcher: Launcher) -> None:
    launcher.wrapper.send(Kind.BOARD, {"admit_at": 7})
    link = launcher.wrapper.program()
    assert link.job_fact("regroups") and (link.admit_at, link.has_question, link.hosts_changed) == (7, False, False)
    launcher.wrapper.send(Kind.BOARD, {"admit_at": 2**40})
    launcher.wrapper.send(Kind.BOARD, {"has_question": True})
    launcher.wrapper.send(Kind.HOSTS_CHANGED)
    link.look()
    assert (link.admit_at, link.has_question, link.hosts_changed) == (2**40, True, True)
    link.has_question = False
    launcher.wrapper.send(Kind.BOARD, {"admit_at": 8})
    link.look()
    assert not link.has_question
    assert launcher.hears(*((Kind.SHOWN, {"admit_at": each}) for each in (7, 2**40, 8)))
    assert launcher.wrapper.program().hosts_changed, "another process of the rank"


def test_frames_of_all_threads_arrive_whole(launcher: Launcher) -> None:
    link = launcher.wrapper.program()
    big = bytes(FROM_PROGRAM[Kind.RESULT])
    threads = [threading.Thread(target=link.send, args=(Kind.RESULT, big)) for _ in range(8)]
    for each in threads:
        each.start()
    assert [link.ask({"number": number}) for number in range(50)] == [{"number": number} for number in range(50)]
    for each in threads:
        each.join()
    assert eventually(lambda: len(launcher.heard) == 58)
    assert sum(payload == big for _, payload in launcher.heard) == 8


def test_a_question_that_is_given_up_gets_no_answer_later(launcher: Launcher) -> None:
    link, launcher.answers = launcher.wrapper.program(), False
    threading.Timer(0.1, launcher.wrapper.send, [Kind.RECORD, b"record"]).start()
    assert link.ask_until({"join": True}, lambda: link.record is not None) is None
    assert link.wait_for_record() == b"record" and link.record is None
    launcher.wrapper.send(Kind.ANSWER, {"late": True})
    launcher.answers = True
    assert link.ask({"join": False}) == {"join": False}


def test_an_answer_that_arrives_before_the_wait_ends_it(launcher: Launcher) -> None:
    link = launcher.wrapper.program()

    def looks_late() -> bool:
        assert link._answer is not None or eventually(lambda: link._arrived.poll(0))
        link.look()
        return link.record is not None

    late = threading.Timer(5.0, launcher.wrapper.send, [Kind.RECORD, b"too late"])
    late.start()
    assert link.ask_until({"join": True}, looks_late) == {"join": True}
    assert link.record is None, "it has waited for the next frame"
    late.cancel()


@pytest.mark.parametrize("name", ["read", "write"])
def test_an_interrupted_call_leaves_no_part_of_a_frame(
    name: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = launcher.wrapper.program()

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(link._channel, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        link.ask({"a": 1})
    assert link.ask({"b": 2}) == {"b": 2}


def test_a_call_and_its_result_have_any_size(launcher: Launcher) -> None:
    link = launcher.wrapper.program()
    call = os.urandom(3 << 20)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(link.call()))
    thread.start()
    assert launcher.hears((Kind.CALL, b""))
    for chunk in (call[: 1 << 20], call[1 << 20 :], b""):
        launcher.wrapper.send(Kind.CALL, chunk)
    thread.join()
    assert got == [call]


def test_the_first_exception_is_reported_and_a_child_process_has_its_own_link(
    launcher: Launcher, linked: program.ProgramLink
) -> None:
    error_report.write(3, ValueError("bad row 17"))
    child = os.fork()
    if not child:
        error_report.write(4, KeyError("x"))
        os._exit(0)
    os.waitpid(child, 0)
    assert linked.ask({"still": "there"}) == {"still": "there"}
    reports = [message for kind, message in launcher.heard if kind is Kind.REPORT]
    assert [(each["rank"], each["summary"]) for each in reports] == [
        (3, "ValueError: bad row 17"),
        (4, "KeyError: 'x'"),
    ]
    assert "ValueError: bad row 17" in reports[0]["traceback"] and reports[0]["host"]


def test_a_wrapper_gets_all_that_an_ended_program_has_sent(tmp_path: Path) -> None:
    link = WrapperLink(tmp_path, OF_JOB)
    child = os.fork()
    if not child:
        own = program.ProgramLink(tmp_path / program.SOCKET)
        for number in range(100):
            own.send(Kind.FIGURES, {"steps": number})
        os.kill(os.getpid(), 9)
    served(link)
    os.waitpid(child, 0)
    assert [json.loads(payload)["steps"] for _, payload in link.drain()] == list(range(100))
    assert len(list(link.sources(list))) == 1


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.EXIT, b"{}"),
        (99, b""),
        (Kind.FIGURES, b"[]"),
        (Kind.FIGURES, b"{torn"),
        (Kind.FIGURES, b"[" * FROM_PROGRAM[Kind.FIGURES]),
        (Kind.FIGURES, b" " * (FROM_PROGRAM[Kind.FIGURES] + 1)),
    ],
)
def test_a_wrapper_closes_a_connection_on_which_something_else_is_sent(
    kind: int, payload: bytes, launcher: Launcher, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(str(tmp_path / program.SOCKET))
        own.sendall(kind.to_bytes(1) + len(payload).to_bytes(8) + payload)
        own.settimeout(60)
        try:
            while own.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
    assert launcher.wrapper.program().ask({"a": 1}) == {"a": 1}
    assert [each for each, _ in launcher.heard] == [Kind.QUESTION]
