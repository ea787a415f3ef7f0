"""The interface through which a job lets ranks join, and the end of a rank that cannot join."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from keras_ddl.communicator.reporting import error_report
from keras_ddl.strategy import resilience
from keras_ddl.topology.launcher import find_launcher


class Joining(resilience.Joining):
    """The interface for the job itself, which needs more than a Strategy does.

    Attributes:
        is_on_its_way: this rank has joined, and has made no step yet.
    """

    is_on_its_way = False

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
