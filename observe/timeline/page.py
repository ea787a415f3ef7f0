"""Writes one self-contained HTML file of a job's steps: page.html with its scripts and the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from keras_ddl.files.durable import write_whole
from keras_ddl.timeline.steps import RankSteps, Step
from keras_ddl.timeline.summary import Summary, lateness, summarize
from keras_ddl.timeline.words import sentences

# The most that a browser draws well; for longer trainings, the collectives of every n-th step are shown.
_COLLECTIVES = 200_000
_SCRIPTS = ("tables.js", "drawing.js", "moving.js")


def write(target: Path, ranks: Sequence[RankSteps], title: str) -> None:
    """Writes the page atomically. Raises: OSError: it cannot be written."""
    text = html(ranks, summarize(ranks), title)
    write_whole(target, lambda part: Path(part).write_text(text, encoding="utf-8"), synced=False)


def html(ranks: Sequence[RankSteps], summary: Summary, title: str) -> str:
    """Returns the page."""
    folder = resources.files(__package__)
    page, *scripts = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", *_SCRIPTS))
    # Escaped, because "</script" inside the data would end the script.
    data = json.dumps(_data(ranks, summary, title), separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("/*scripts*/", "".join(scripts)).replace("{/*data*/}", data)


def _data(ranks: Sequence[RankSteps], summary: Summary, title: str) -> dict[str, Any]:
    """Returns the input of the scripts. Times are in microseconds; steps count from the beginning of the first step."""
    start = min(each.steps[0].begin for each in ranks)
    count = sum(len(step.collectives) for each in ranks for step in each.steps)
    every = -(-count // _COLLECTIVES) or 1
    names: dict[str, int] = {}
    return {
        "title": title,
        "words": sentences(summary),
        "summary": asdict(summary),
        "every": every,
        "numbers": [step.number for step in ranks[0].steps],
        "late": [[_us(each) for each in one] for one in zip(*lateness(ranks))],
        "ranks": [
            {
                "rank": each.rank,
                "host": each.host,
                "steps": [_step(step, start) for step in each.steps],
                "collectives": [
                    _collectives(step, names) if index % every == 0 else [] for index, step in enumerate(each.steps)
                ],
            }
            for each in ranks
        ],
        "names": list(names),
    }


def _step(step: Step, start: float) -> list[Any]:
    """[begin, then since the begin: batch ready, end, begin of the next, [begin and end of each wait, ...]]"""
    waits = [_us(moment - step.begin) for wait in step.exposed for moment in wait]
    return [_us(step.begin - start), _us(step.input), _us(step.end - step.begin), _us(step.total), waits]


def _collectives(step: Step, names: dict[str, int]) -> list[list[int]]:
    """[[name, bytes, submitted since the step's begin, then since that: started, finished], ...]"""
    return [
        [
            names.setdefault(one.name, len(names)),
            one.bytes,
            _us(one.submitted - step.begin),
            _us(one.started - one.submitted),
            _us(one.finished - one.submitted),
        ]
        for one in step.collectives
    ]


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
