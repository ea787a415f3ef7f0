"""Checks which native folders include which, where headers of other projects are named, and who catches exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .sources import Finding, Project, circles

# A source of the core may include from its own folder and from folders above it in this list.
FOLDERS = [
    "base",  # status, views of memory, waiting, texts, traces; includes nothing else
    "host",  # a transport between processes of one host
    "kernels",  # arithmetic on host memory
    "shm",  # collectives among the ranks of one host
    "net",  # collectives between hosts, over the transport
    "hierarchy",  # combines shm and net
    "device",  # a device's memory, as far as the core knows it
    "liveness",  # which ranks run where, and which are lost
    "control",  # the coordinator and its messages: which ranks are ready for what
    "engine",  # the thread that runs submitted requests
    "api",  # include/
]
# Folder of native/ -> what its sources must not include.
FORBIDDEN = {
    "common": r'#include\s*("(?!common/|ddl\.h")|<(mpi|tensorflow|Python))',
    "core": r'#include\s*[<"](mpi|tensorflow|Python|tf_|cuda|nccl)',
    "cuda": r'#include\s*[<"](mpi|tensorflow|Python|tf_|cuda\.h|nccl\.h)',  # headers that a build must do without
    "mpi": r'#include\s*[<"](tensorflow|Python|tf_)',
    "tf": r'#include\s*[<"](mpi|Python)',
}
CATCHERS = {"base/guard.h", "engine/communication_thread.cc"}  # the second catches a failure to start a thread


def core_of(project: Project) -> Path:
    return project.root / "native" / "core" / "src"


def sources_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.suffix in {".cc", ".h"}]


def includes(project: Project) -> dict[str, dict[str, int]]:
    """Returns source of the core -> included source -> line. Leaves out include/ and common/, open to everyone."""
    core = core_of(project)
    return {
        str(path.relative_to(core)): {
            match[1]: line
            for line, match in project.matches(path, r'#include "([^"]+)"')
            if match[1] not in ("ddl.h", "ddl_device.h", "ddl_host.h") and not match[1].startswith("common/")
        }
        for path in sources_of(core)
    }


def sources_lie_in_listed_folders(project: Project) -> Iterator[Finding]:
    """The core's sources lie in FOLDERS, none of which is empty, and include each other by the path from there."""
    found = includes(project)
    used = {name.rpartition("/")[0] for name in found}
    for folder in sorted(set(FOLDERS) - used):
        yield Finding(
            core_of(project) / folder, 1, "has no sources: change FOLDERS of tools/structure/native_layers.py"
        )
    for name, targets in found.items():
        if name.rpartition("/")[0] not in FOLDERS:
            yield Finding(core_of(project) / name, 1, "lies in no folder of FOLDERS, tools/structure/native_layers.py")
        for target, line in targets.items():
            if target not in found:
                yield Finding(core_of(project) / name, line, f"{target}: write the path from native/core/src")


def includes_point_up(project: Project) -> Iterator[Finding]:
    """A source of the core includes from its own folder and from folders above it in FOLDERS."""
    place = {folder: number for number, folder in enumerate(FOLDERS)}
    for name, targets in includes(project).items():
        for target, line in targets.items():
            own, other = place.get(name.partition("/")[0]), place.get(target.partition("/")[0])
            if own is not None and (other is None or other > own):
                yield Finding(core_of(project) / name, line, f"includes {target}, from a later folder")


def includes_make_no_circle(project: Project) -> Iterator[Finding]:
    """No two headers of the core include each other, directly or indirectly."""
    for name, others in circles({name: set(targets) for name, targets in includes(project).items()}).items():
        yield Finding(core_of(project) / name, 1, f"in a circle of includes, or above one, with {sorted(others)}")


def layers_stay_apart(project: Project) -> Iterator[Finding]:
    """Only the folder of native/ made for MPI, TensorFlow or Python names their headers."""
    for folder, pattern in FORBIDDEN.items():
        sources = sources_of(project.root / "native" / folder)
        if not sources:
            yield Finding(project.root / "native" / folder, 1, "the folder moved: change FORBIDDEN")
        for path in sources:
            for line, match in project.matches(path, pattern):
                yield Finding(path, line, f"{match[0].strip()} is not for native/{folder}")


def exceptions_are_caught_in_guard(project: Project) -> Iterator[Finding]:
    """The core catches exceptions only in base/guard.h, whose functions others call, and in the other CATCHERS."""
    core = core_of(project)
    for path in sources_of(core):
        for line, _ in project.matches(path, r"\bcatch \("):
            if str(path.relative_to(core)) not in CATCHERS:
                yield Finding(path, line, "catches by itself: use a function of base/guard.h")


RULES = (
    sources_lie_in_listed_folders,
    includes_point_up,
    includes_make_no_circle,
    layers_stay_apart,
    exceptions_are_caught_in_guard,
)
