"""The way through native/: which folder of the core may include which, and where foreign headers may be named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
CORE = NATIVE / "core" / "src"

# A source of the core may include from its own folder and from those above it in this list.
FOLDERS = [
    "base",  # status, views of memory, waiting, texts, traces: knows nobody
    "host",  # a transport between processes of one host
    "kernels",  # arithmetic on host memory
    "shm",  # collectives among the ranks of one host
    "net",  # collectives between hosts, over the transport
    "hierarchy",  # both composed
    "liveness",  # who runs where, and who is gone
    "control",  # who is ready for what: the coordinator and its messages
    "engine",  # the thread that runs what is submitted
    "api",  # include/
]


def sources_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.suffix in {".cc", ".h"}]


def includes_of(path: Path) -> list[str]:
    """What `path` includes of the core's sources. The contracts in include/ and what is in common/ are open to all."""
    names = re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8"))
    return [name for name in names if name not in ("ddl.h", "ddl_host.h") and not name.startswith("common/")]


INCLUDES = {str(path.relative_to(CORE)): includes_of(path) for path in sources_of(CORE)}


def test_native_sources_lie_in_listed_folders() -> None:
    assert {name.rpartition("/")[0] for name in INCLUDES} == set(FOLDERS)


def test_native_includes_name_the_folder() -> None:
    lost = {name: wrong for name, targets in INCLUDES.items() if (wrong := [t for t in targets if t not in INCLUDES])}
    assert lost == {}, "includes are written from native/core/src on"


@pytest.mark.parametrize("folder", FOLDERS)
def test_native_includes_point_up(folder: str) -> None:
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    inside = {name: targets for name, targets in INCLUDES.items() if name.startswith(f"{folder}/")}
    assert inside, "the folder moved: change this test"
    wrong = [f"{n} -> {t}" for n, targets in inside.items() for t in targets if t.partition("/")[0] not in allowed]
    assert wrong == [], f"{folder} includes from a later folder"


def test_native_includes_make_no_circle() -> None:
    waiting = {name: set(targets) for name, targets in INCLUDES.items()}
    while free := [name for name, targets in waiting.items() if not targets & waiting.keys()]:
        for name in free:
            del waiting[name]
    circles = {name: sorted(targets & waiting.keys()) for name, targets in waiting.items()}
    assert circles == {}, "these headers include one another, or headers that do"


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("common", r'#include\s*("(?!common/|ddl\.h")|<(mpi|tensorflow|Python))'),
        ("core", r'#include\s*[<"](mpi|tensorflow|Python|tf_)'),
        ("mpi", r'#include\s*[<"](tensorflow|Python|tf_)'),
        ("tf", r'#include\s*[<"](mpi|Python)'),
    ],
)
def test_native_layers_stay_apart(folder: str, forbidden: str) -> None:
    sources = sources_of(NATIVE / folder)
    assert sources, "the folder moved: change this test"
    guilty = [str(path) for path in sources if re.search(forbidden, path.read_text(encoding="utf-8"))]
    assert guilty == []
