"""Measures the exposed communication of a step now and then, so that it costs next to nothing on average."""

from __future__ import annotations

import time

from keras_ddl.communicator import recording
from keras_ddl.communicator.native import native_timeline
from keras_ddl.timeline import steps
from keras_ddl.timeline.files import Collective

_COLLECTIVES = 4096  # kept for one step


class StepSample:
    """One step of this rank, from its construction to `end`, which the caller calls when the next step begins.

    Nothing is measured if the program itself keeps collectives (timeline.keep, callbacks.StepMetrics), because only one
    reader gets a collective.
    """

    def __init__(self) -> None:
        self._is_on = not recording.keeps()
        self._ended: float | None = None
        if self._is_on:
            native_timeline.keep(_COLLECTIVES)
        self._begin = time.monotonic()

    def step_ended(self) -> None:
        """Called when the step has ended. As in a timeline (timeline/steps.py), the time until `end` belongs to it."""
        self._ended = time.monotonic()

    def end(self) -> float | None:
        """Returns the step's seconds of exposed communication, None if not measured."""
        if not self._is_on or recording.keeps():
            return None
        now = time.monotonic()
        collectives = [Collective(0, "", *one) for one in native_timeline.take()]
        native_timeline.keep(0)
        if self._ended is None:  # the step failed
            return None
        spans = [(self._begin, self._ended, 0), (now, now, 1)]
        return steps.steps_of_spans(spans, collectives)[0].waiting
