"""Defines which folders of keras_ddl/ may import which, and which modules may use foreign private interfaces."""

from __future__ import annotations

from collections.abc import Iterator

from keras_ddl.parts import FOLDERS

from .sources import Finding, Project, cycles

# A folder (or a module directly in keras_ddl/) may import from its own line and from lines above it. The last line
# lists the parts.
LINE = [
    ("errors",),
    ("parts",),
    ("files", "packages"),
    ("config",),
    ("topology",),
    ("link",),
    ("communicator",),
    ("launch", "schedules", "compat"),
    ("device", "ops"),
    ("gradients",),
    ("cut", "data"),
    ("state",),
    ("strategy", "checkpoint"),
    ("model_state",),
    ("callbacks",),
    ("cli",),
    tuple(FOLDERS),
]
# A part may import another part only inside a function, after checking that it is installed.
BETWEEN_PARTS = {
    ("bench", "cost_model"),
    ("bench", "timeline"),
    ("monitoring", "timeline"),
    ("serving", "export"),
}
# These import parts for type checkers only. At run time they find parts by what the parts provide.
FOR_TYPE_CHECKERS = {"keras_ddl.callbacks"}
PLACE = {folder: number for number, folders in enumerate(LINE) for folder in folders}

# Users import these modules by name; all others lie in folders.
BESIDE = {"__init__", "config", "errors", "model_state", "parts", "schedules"}
ROOM = "keras_ddl.strategy.distribute_loop"

# Patterns, and the modules of keras_ddl that may and must contain them.
HOMES = [
    # The launcher's wrapper (which calls prctl, to end with its parent) and the search for GPUs (which asks NVIDIA's
    # driver) must not load the native library. The server asks the C library to return memory.
    (
        r"^\s*(import|from) ctypes",
        {
            *(
                "communicator.native.binding",
                "communicator.native.native_library",
                "communicator.native.native_signals",
            ),
            *("communicator.native.native_timeline", "communicator.native.requests", "communicator.native.started"),
            *("communicator.transports.host", "communicator.transports.host_messages"),
            *("packages.nvidia_driver", "launch.rank.processes", "export.proof.clean_process"),
            *("serving.processes.memory", "compat.gpu_stream"),
        },
    ),
    # One module for each, which lists all such imports with their versions.
    (r"^\s*(import|from) tensorflow\.python|tf\.python\b", {"compat.tensorflow"}),
    (r"^\s*(import|from) keras\.src", {"compat.keras"}),
    # Only this module reads the project's variables from the environment.
    (r"environ(\.get\(|\[)(\w+\.)?(\"KERAS_DDL_|PREFIX|environment_name|variable)", {"config"}),
]


def inside(project: Project) -> list[str]:
    """Returns the modules of keras_ddl, except the package itself."""
    return sorted(set(project.modules) - {"keras_ddl"})


def folder_of(module: str) -> str:
    return module.split(".")[1]


def imports_point_one_way(project: Project) -> Iterator[Finding]:
    """A module imports from its own folder and from folders on lines above its own; see LINE."""
    for name in inside(project):
        path, folder = project.modules[name], folder_of(name)
        if folder not in PLACE:
            yield Finding(path, 1, "the folder has no place in LINE of tools/structure/layers.py")
            continue
        for target, line in project.imports_of(name).items():
            if target == "keras_ddl":
                if folder != "cli" and folder not in FOLDERS:  # the package's names import everything
                    yield Finding(path, line, "imports from keras_ddl/__init__.py, which imports it")
                continue
            if (folder, folder_of(target)) in BETWEEN_PARTS or (
                name in FOR_TYPE_CHECKERS and folder_of(target) in FOLDERS
            ):
                continue
            place = PLACE.get(folder_of(target), -1)  # a missing target is reported in its own folder
            if place > PLACE[folder]:
                yield Finding(path, line, f"imports {target}, which is on a later line of LINE")
            if place == PLACE[folder] and folder_of(target) != folder:
                yield Finding(path, line, f"imports {target}, from another folder on the same line of LINE")


def sibling_folders_import_one_way(project: Project) -> Iterator[Finding]:
    """Sibling folders do not import each other in a cycle."""
    imports: dict[str, dict[str, dict[str, Finding]]] = {}  # folder -> subfolder -> imported sibling -> where
    for name in inside(project):
        path = project.modules[name]
        words = (name if path.stem == "__init__" else name.rpartition(".")[0]).split(".")
        for depth in range(2, len(words)):
            above, own = ".".join(words[:depth]), ".".join(words[: depth + 1])
            own_imports = imports.setdefault(above, {}).setdefault(own, {})
            for target, line in project.imports_of(name).items():
                there = ".".join(target.split(".")[: depth + 1])
                if target.startswith(f"{above}.") and there != own:
                    own_imports.setdefault(
                        there, Finding(path, line, f"imports {there}, which is in a cycle of folders")
                    )
    for folders in imports.values():
        for own, others in cycles({own: set(found) for own, found in folders.items()}).items():
            yield from (folders[own][other] for other in sorted(others))


def no_import_cycles(project: Project) -> Iterator[Finding]:
    """No two modules import each other, directly or indirectly.

    Imports inside functions count, because they only delay a cycle. Two things do not count: the package itself, whose
    names are imported on first use, and the fact that importing a submodule runs its package's __init__.
    """
    targets = {name: set(project.imports_of(name)) - {"keras_ddl"} for name in inside(project)}
    for name, others in cycles(targets).items():
        yield Finding(project.modules[name], 1, f"in a cycle of imports, or needs one, with {sorted(others)}")


def distribute_loop_is_entered_by_the_strategy(project: Project) -> Iterator[Finding]:
    """Outside of keras_ddl.strategy.distribute_loop, only keras_ddl.strategy itself imports from it."""
    room = {name for name in project.modules if name == ROOM or name.startswith(f"{ROOM}.")}
    if not room > {ROOM}:
        yield Finding(project.root, 1, f"{ROOM} is not a folder of modules: change this rule")
    users = {name for name in inside(project) if name not in room and set(project.imports_of(name)) & room}
    for name in users ^ {"keras_ddl.strategy"}:
        does = "imports" if name in users else "does not import"
        yield Finding(project.modules.get(name, project.root), 1, f"{does} {ROOM}: only keras_ddl.strategy does")


def top_level_modules_are_public(project: Project) -> Iterator[Finding]:
    """The modules directly in keras_ddl/ are the modules that users import by name; see BESIDE."""
    beside = {path.stem for path in (project.root / "keras_ddl").glob("*.py")}
    for name in sorted(beside ^ BESIDE):
        state = "is" if name in beside else "is not"
        yield Finding(project.root / "keras_ddl" / f"{name}.py", 1, f"{state} directly in keras_ddl/: change BESIDE")


def private_interfaces_have_one_home(project: Project) -> Iterator[Finding]:
    """Only their HOMES use ctypes, tensorflow.python, keras.src and the project's environment variables."""
    for pattern, names in HOMES:
        home = {f"keras_ddl.{name}" for name in names}
        for name, path in project.modules.items():
            lines = [line for line, _ in project.matches(path, pattern)]
            if lines and name not in home:
                yield Finding(path, lines[0], f"{pattern} belongs in {', '.join(sorted(home))}")
            if not lines and name in home:
                yield Finding(path, 1, f"{pattern} is no longer here: change HOMES")
        for name in sorted(home - project.modules.keys()):
            yield Finding(project.root, 1, f"{name} is gone: change HOMES")


RULES = (
    imports_point_one_way,
    sibling_folders_import_one_way,
    no_import_cycles,
    distribute_loop_is_entered_by_the_strategy,
    top_level_modules_are_public,
    private_interfaces_have_one_home,
)
