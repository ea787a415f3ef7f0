"""What counts as a rank that does nothing but wait; that such ranks are told, the Strategy's deadlock checks show."""

import sys
import threading
import time

import pytest
from tensorflow.python.eager import execute

from keras_ddl.communicator.native import requests, started
from keras_ddl.communicator.reporting import idleness


def frame_of(wait, innermost: str) -> object:
    """The innermost frame of a thread in `wait`, which is in the function of that name."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while (frame := sys._current_frames()[thread.ident]).f_code.co_name != innermost:
        time.sleep(0.01)
    time.sleep(0.1)  # for the lines of that function before it waits
    return frame


def test_only_a_wait_without_an_end_is_one_for_another_thread():
    event, condition = threading.Event(), threading.Condition()

    def for_condition():
        with condition:
            condition.wait()

    try:
        assert idleness._waits_without_timeout(frame_of(event.wait, "wait"))
        assert idleness._waits_without_timeout(frame_of(for_condition, "wait"))
        assert not idleness._waits_without_timeout(frame_of(lambda: event.wait(600), "wait"))
        assert not idleness._waits_without_timeout(frame_of(lambda: time.sleep(1), "<lambda>"))
    finally:
        event.set()
        with condition:
            condition.notify()


def test_waits_for_collectives_are_known(monkeypatch: pytest.MonkeyPatch):
    waiting, before = True, set(threading.enumerate())

    class Core:
        def ddl_work_wait(self, work: int, milliseconds: int) -> bool:
            time.sleep(min(milliseconds, 100) / 1000)
            return not waiting

        def ddl_work_free(self, work: int) -> None:
            pass

    for module in (started, requests):
        monkeypatch.setattr(module, "core", Core)
    started_one, binding = started.Started.__new__(started.Started), requests.Requests.__new__(requests.Requests)
    started_one._work, binding._waiting = 0, False

    def is_known(wait, innermost: str) -> bool:
        frame = frame_of(wait, "ddl_work_wait").f_back
        assert frame.f_code.co_name == innermost
        return idleness._waits_for_collectives(frame)

    try:
        assert is_known(started_one.wait, "wait")
        assert not is_known(lambda: started_one.wait(600.0), "wait")
        assert is_known(lambda: binding._wait(0, None), "_wait")
        for name in idleness._WAITING_IN_TENSORFLOW:
            assert getattr(execute, name).__code__.co_filename.endswith(idleness._TENSORFLOW)
    finally:
        waiting = False
        for thread in set(threading.enumerate()) - before:
            thread.join()


def share_of_a_core_wanted(polls: bool) -> float:
    """What this process counts as having wanted of a core while a thread computes."""
    is_over = threading.Event()

    def compute():
        if polls:
            idleness.this_thread_polls()
        while not is_over.is_set():
            pass

    def wanted() -> float:
        return sum(idleness._runnable_seconds().values())

    before, began = wanted(), time.monotonic()
    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.7)
    used, elapsed = wanted() - before, time.monotonic() - began
    is_over.set()
    thread.join()
    return used / elapsed


def test_thread_that_computes_wants_a_core():
    assert share_of_a_core_wanted(polls=False) > 0.5  # however few cores there are: a queued thread wants one, too


def test_thread_of_ours_that_polls_does_not_count():
    assert any(share_of_a_core_wanted(polls=True) < 0.2 for _ in range(5))  # other threads of this process may queue


def test_process_whose_main_thread_does_something_else_is_not_idle():
    asked = idleness.Idleness()
    seconds = []

    def ask():
        for _ in range(2):
            seconds.append(asked.seconds())
            time.sleep(1.1)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seconds == [0.0, 0.0]
