"""Reads the news that a rank's program leaves for watchers of the job (files/news.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_ddl.files import news

LOOK_SECONDS = 1.0
_CHECKPOINTS_BYTES = 1 << 16  # read at a time


class RankNews:
    """The news of one rank's program.

    Args:
        run_dir: the program's KERAS_DDL_RUN_DIR.
        wanted: the news that the launcher's welcome asks for: "figures", or only checkpoints.
    """

    def __init__(self, run_dir: Path, wanted: Mapping[str, bool]) -> None:
        self._run_dir, self._checkpoints = run_dir, run_dir / news.CHECKPOINTS
        for name in (news.CHECKPOINTS, *((news.FIGURES,) if wanted["figures"] else ())):
            (run_dir / name).touch()
        self._looked = 0.0
        self._figures: dict[str, Any] | None = None
        self._place = 0  # up to which the checkpoints were read

    def take(self, *, is_last: bool = False) -> dict[str, Any]:
        """Returns the payload of a NEWS frame; {} if nothing is new, or the last call was a moment ago."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS and not is_last:
            return {}
        self._looked, taken = now, dict[str, Any]()
        figures = news.read_figures(self._run_dir)
        if figures is not None and figures != self._figures:
            self._figures = taken["figures"] = figures
        added = _read(self._checkpoints, self._place, _CHECKPOINTS_BYTES)
        complete = added[: added.rfind(b"\n") + 1]
        self._place += len(complete)
        checkpoints = [each for line in complete.splitlines() if (each := _parsed(line)) is not None]
        return taken | ({"checkpoints": checkpoints} if checkpoints else {})


def _read(path: Path, place: int, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(place)
            return file.read(most)
    except OSError:
        return b""


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
