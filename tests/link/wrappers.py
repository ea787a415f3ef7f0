"""The wrapper's end of a program's connection, served by a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from keras_ddl.launch.rank.program_link import Frame, WrapperLink
from keras_ddl.link import loop, program
from keras_ddl.link.kinds import Kind

OF_JOB = {"regroups": True, "takes_newcomers": True, "figures": True, "clock": {}}


def served(link: WrapperLink) -> list[Frame]:
    """Returns what a program sends next."""
    frames: list[Frame] = []
    loop.serve(60, link.sources(frames.extend))
    return frames


class Wrapper:
    """Passes on to `hear` what the programs that connect in `folder` send."""

    def __init__(self, folder: Path, hear: Callable[[Kind, bytes], None], **of_job: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._link = WrapperLink(folder, OF_JOB | of_job)
        self._path, self._hear = folder / program.SOCKET, hear
        self._lock = threading.Lock()  # of the link
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def program(self) -> program.ProgramLink:
        """Returns the end of a program that has just begun."""
        return program.ProgramLink(self._path)

    def send(self, kind: Kind, message: bytes | dict[str, Any] = b"") -> None:
        """Sends the programs what the launcher would."""
        with self._lock:
            frames = list(
                self._link.take(kind, message if isinstance(message, bytes) else json.dumps(message).encode())
            )
        self._pass_on(frames)

    def _serve(self) -> None:
        while not self._ended.is_set():
            frames: list[Frame] = []
            with self._lock:
                sources = list(self._link.sources(frames.extend))
            loop.serve(0.005, [(fd, events, partial(self._locked, handle)) for fd, events, handle in sources])
            self._pass_on(frames)

    def _locked(self, handle: Callable[[], object]) -> None:
        with self._lock:
            handle()

    def _pass_on(self, frames: list[Frame]) -> None:
        for kind, payload in frames:
            self._hear(kind, payload if isinstance(payload, bytes) else json.dumps(payload).encode())

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
