"""The way through the house: which folder may import which, and where foreign private interfaces may be touched."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from harness.source_modules import MODULES, PARTS, ROOT, imports_of

# A folder (or a module of keras_ddl/ itself) may import from its own line and from those above it.
LINE = [
    ("errors",),
    ("parts",),
    ("files", "packages"),
    ("config",),
    ("topology",),
    ("communicator",),
    ("launch", "schedules", "compat"),
    ("device", "ops"),
    ("gradients",),
    ("cut", "data"),
    ("strategy", "checkpoint"),
    ("model_state",),
    ("resuming",),
    ("callbacks",),
    ("cli",),
    tuple(PARTS),
]
PLACE = {folder: number for number, folders in enumerate(LINE) for folder in folders}
# A part imports another one inside a function, after it has asked whether it is installed.
BETWEEN_PARTS = {
    ("bench", "cost_model"),
    ("bench", "timeline"),
    ("monitoring", "timeline"),
    ("serving", "export"),
}
# Names for type checkers, which the core finds when it runs by what parts provide.
FOR_TYPE_CHECKERS = {"keras_ddl", "keras_ddl.callbacks"}


INSIDE = sorted(set(MODULES) - {"keras_ddl"})


def folder_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("name", INSIDE)
def test_imports_point_one_way(name: str) -> None:
    assert folder_of(name) in PLACE, "give this folder a place in LINE"
    targets = imports_of(name)
    place = PLACE[folder_of(name)]
    targets -= {t for t in targets if t != "keras_ddl" and (folder_of(name), folder_of(t)) in BETWEEN_PARTS}
    if name in FOR_TYPE_CHECKERS:
        targets = {t for t in targets if folder_of(t) not in PARTS}
    back = [t for t in targets if t != "keras_ddl" and PLACE[folder_of(t)] > place]
    assert back == [], f"{name} imports from further along the line"
    beside = [
        t for t in targets if t != "keras_ddl" and PLACE[folder_of(t)] == place and folder_of(t) != folder_of(name)
    ]
    assert beside == [], f"{name} imports from a folder of its own line: those stand side by side"
    if folder_of(name) != "cli" and folder_of(name) not in PARTS:  # the package's names lead to everything
        assert "keras_ddl" not in targets, f"{name} imports from keras_ddl/__init__.py, which imports it"


def test_no_circle_of_imports() -> None:
    # Imports inside functions count too: they only put a circle off. Left out are the package itself, whose names are
    # imported on first use, and that importing a submodule also runs its package's __init__, which imports its parts.
    waiting = {name: imports_of(name) - {"keras_ddl"} for name in INSIDE}
    while free := [name for name, targets in waiting.items() if not targets & waiting.keys()]:
        for name in free:
            del waiting[name]
    circles = {name: sorted(targets & waiting.keys()) for name, targets in waiting.items()}
    assert circles == {}, "these modules import one another, or modules that do"


def test_the_room_of_tf_distributes_loop_is_entered_by_the_strategy_alone() -> None:
    room = "keras_ddl.strategy.distribute_loop"
    inside = {name for name in MODULES if name == room or name.startswith(f"{room}.")}
    assert inside > {room}
    assert {name for name in INSIDE if name not in inside and imports_of(name) & inside} == {"keras_ddl.strategy"}


def test_modules_beside_the_folders_are_what_users_import_by_name() -> None:
    beside = {path.stem for path in (ROOT / "keras_ddl").glob("*.py")}
    assert beside == {"__init__", "config", "errors", "model_state", "parts", "schedules"}


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        # The launcher's wrapper asks the kernel (prctl) to outlive nobody, and is too light for the native library; the
        # server asks the C library to give back memory.
        (
            r"^\s*(import|from) ctypes",
            {
                *("communicator.binding", "communicator.native_library", "communicator.native_signals"),
                *("communicator.native_timeline", "communicator.requests", "communicator.started"),
                *("communicator.host", "communicator.host_messages"),
                *("launch.processes", "export.proof.clean_process", "serving.memory"),
            },
        ),
        # Only two modules: what they import is in one list each, with the versions that have it.
        (r"^\s*(import|from) tensorflow\.python|tf\.python\b", {"compat.tensorflow"}),
        (r"^\s*(import|from) keras\.src", {"compat.keras"}),
        # The names of the project's variables meet the environment in one place; others pass them on by name.
        (r"environ(\.get\(|\[)(\w+\.)?(\"KERAS_DDL_|PREFIX|environment_name|variable)", {"config"}),
    ],
)
def test_private_interfaces_have_one_home(pattern: str, home: set[str]) -> None:
    users = {n for n, p in MODULES.items() if re.search(pattern, p.read_text(encoding="utf-8"), re.MULTILINE)}
    assert users == {f"keras_ddl.{name}" for name in home}


def test_every_module_of_export_can_be_the_first_that_is_imported():
    names = [name for name in MODULES if name.startswith("keras_ddl.export.")]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for known in [each for each in sys.modules if each.startswith('keras_ddl.export')]:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", program, *names], check=True, timeout=120)
