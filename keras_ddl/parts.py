"""Reads what optional parts add to the core, which imports none of them.

A part is a folder of the repository with a part.toml (resilience/, export/, serving/, those in integrations/ and
observe/), installed as a package of keras_ddl. If its folder is deleted, everything else works as before. Its part.toml
lists its additions:

    public = true                        # keras_ddl.NAME works without a separate import
    [commands.serve]                     # the command `keras-ddl serve`
    module = "keras_ddl.serving.serve_command"
    help = "Serve a SavedModel over gRPC and REST, for trials."
    [settings.TRACK_ALL_RANKS]           # the variable KERAS_DDL_TRACK_ALL_RANKS, a row of config.py
    type = "0 or 1"
    default = false
    why = "..."
    [provides]                           # what the core asks for by name (`provided`)
    in_ranks = "keras_ddl.trackers:leave_to_rank_0"

The core asks for:
    base_graphs: writes what `keras-ddl export` needs (callbacks/_base_graphs.py).
    callbacks.NAME: the class keras_ddl.callbacks.NAME.
    resilience: what a training does when ranks are lost or join (strategy/resilience.py).
    in_ranks: called without arguments when keras_ddl is imported in a rank.
    run_options: a module of options for `keras-ddl run` (cli/part_options.py).
    training_figures: counts what a rank trains (strategy/figures.py).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.errors import DependencyError

# All parts of the project and their folders, in the order of `keras-ddl --help`; and what else users call them by.
# Only messages and a checkout that is not installed depend on it: a part is here where its part.toml is.
FOLDERS = {
    "resilience": "resilience",
    "export": "export",
    "serving": "serving",
    "verify": "observe/verify",
    "bench": "observe/bench",
    "timeline": "observe/timeline",
    "doctor": "observe/doctor",
    "monitoring": "observe/monitoring",
    "cost_model": "observe/cost_model",
    "horovod": "integrations/horovod",
    "ddl": "integrations/ddl",
    "torch": "integrations/torch",
    "tuner": "integrations/tuner",
    "trackers": "integrations/trackers",
}
_ALSO_CALLED = {
    **{name: (name,) for name in ("verify", "bench", "doctor")},
    "export": ("export", "callbacks.ExportBase", "callbacks.Publish"),
    "serving": ("serve", "predict"),
    "timeline": ("trace", "callbacks.StepMetrics"),
    "monitoring": ("--events", "--metrics-port", "--metrics-address"),
    "horovod": ("--as-horovod",),
    "ddl": ("ddlrun",),
}


@dataclass(frozen=True)
class Part:
    """Holds what the part.toml of an installed part declares."""

    name: str
    folder: Path
    public: bool
    commands: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, Mapping[str, Any]]
    provides: Mapping[str, str]


@functools.cache
def installed() -> tuple[Part, ...]:
    """Returns the installed parts. Cost: reads a small file of each part, once."""
    found = []
    for name in FOLDERS:
        for root in sys.modules["keras_ddl"].__path__:
            file = Path(root, name, "part.toml")
            if file.exists():
                declared = tomllib.loads(file.read_text(encoding="utf-8"))
                sections = (declared.get(each, {}) for each in ("commands", "settings", "provides"))
                found.append(Part(name, file.parent, declared.get("public", False), *sections))
                break
    return tuple(found)


@functools.cache
def sources() -> tuple[str, ...]:
    """Returns path prefixes of all modules of keras_ddl and its parts, without the parts' tests."""
    found = [f"{Path(__file__).parent}{os.sep}"]
    for part in installed():
        found += [
            f"{each}{os.sep}" if each.is_dir() else str(each) for each in part.folder.iterdir() if each.name != "tests"
        ]
    return tuple(found)


def public() -> list[str]:
    """Returns the names of parts that are attributes of keras_ddl."""
    return [part.name for part in installed() if part.public]


def provided(what: str) -> list[Any]:
    """Imports and returns what the installed parts provide under this name: one object, or module, per part."""
    return [_imported(part.provides[what]) for part in installed() if what in part.provides]


def words_of(name: str) -> tuple[str, ...]:
    """Returns the commands, options and callbacks of a part, whether or not it is installed."""
    return _ALSO_CALLED.get(name, ())


def part_of(word: str) -> str | None:
    """Returns the part that a command, an option, a module or a callback belongs to, or None."""
    word = word.removeprefix("keras_ddl.")
    if word in FOLDERS:
        return word
    return next((name for name, words in _ALSO_CALLED.items() if word in words), None)


def is_missing(word: str) -> bool:
    """Whether `word` belongs to a part that is not installed."""
    name = part_of(word)
    return name is not None and all(part.name != name for part in installed())


def why_missing(word: str) -> str:
    """Returns the error message for something that belongs to a part that is not installed."""
    name = part_of(word)
    assert name is not None
    return (
        f"{word} belongs to the part {name!r} of keras_ddl, which must be installed. Received: an installation without "
        f"it ({Path(__file__).parent}). Install keras_ddl with its folder {FOLDERS[name]}/."
    )


def need(word: str) -> None:
    """Raises: DependencyError: `word` belongs to a part that is not installed."""
    if is_missing(word):
        raise DependencyError(why_missing(word))


def _imported(address: str) -> Any:
    module, _, name = address.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported
