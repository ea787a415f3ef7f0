"""How ranks join a job, as the job calls it; and how a rank that cannot join ends."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from keras_ddl.communicator.reporting import error_report
from keras_ddl.topology.launcher import find_launcher


class Joining:
    """No rank joins: nothing here does anything. Methods that Resilience has, too, do what they say there.

    Attributes:
        has_newcomers: ranks have joined at some time; all ranks compare from then on, whoever is left.
        is_on_its_way: this rank has joined, and has made no step yet.
    """

    has_newcomers = False
    is_on_its_way = False

    def begin_fit(self, callbacks: Any) -> None: ...
    def begin_epoch(self) -> bool:
        return False

    def between_steps(self, caller: Any) -> None: ...
    def check_batch(self, batch: Any) -> None: ...
    def prove(self, callbacks: Any) -> None: ...
    def end_fit(self) -> None: ...
    def look(self) -> None:
        """Lets rank 0 answer ranks that want to join. Called now and then."""

    def become_first(self) -> None:
        """Called when this rank becomes rank 0."""

    def share_state(self, giver: int) -> None:
        """Gives ranks that join the state of rank `giver`. COLLECTIVE over all ranks, these included."""


def give_up(error: Exception) -> NoReturn:
    """Ends a newcomer that cannot join: the other ranks continue without it, and the launcher says why."""
    launcher = find_launcher()
    assert launcher is not None  # which has started it
    error_report.write(launcher.rank, error, gives_up=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # what ends in another way ends the job
    raise error
