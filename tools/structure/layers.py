"""Which folder of keras_ddl/ may import which, and where foreign private interfaces may be touched."""

from __future__ import annotations

from collections.abc import Iterator

from keras_ddl.parts import FOLDERS

from .sources import Finding, Project, circles

# A folder (or a module of keras_ddl/ itself) may import from its own line and from those above it. The last line is
# that of the parts.
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
# A part imports another one inside a function, after it has asked whether it is installed.
BETWEEN_PARTS = {
    ("bench", "cost_model"),
    ("bench", "timeline"),
    ("monitoring", "timeline"),
    ("serving", "export"),
}
# They name parts for type checkers; when they run, they find them by what parts provide.
FOR_TYPE_CHECKERS = {"keras_ddl.callbacks"}
PLACE = {folder: number for number, folders in enumerate(LINE) for folder in folders}

# Users import these by name; all else lies in folders.
BESIDE = {"__init__", "config", "errors", "model_state", "parts", "schedules"}
ROOM = "keras_ddl.strategy.distribute_loop"

# A pattern, and the modules of keras_ddl that alone have it: each of them must.
HOMES = [
    # The launcher's wrapper asks the kernel (prctl) to outlive nobody, and is too light for the native library, as is
    # the look for GPUs, which asks NVIDIA's driver; the server asks the C library to give back memory.
    (
        r"^\s*(import|from) ctypes",
        {
            *("communicator.binding", "communicator.native_library", "communicator.native_signals"),
            *("communicator.native_timeline", "communicator.requests", "communicator.started"),
            *("communicator.host", "communicator.host_messages"),
            *("launch.gpus", "launch.processes", "export.proof.clean_process", "serving.memory"),
        },
    ),
    # Only two modules: what they import is in one list each, with the versions that have it.
    (r"^\s*(import|from) tensorflow\.python|tf\.python\b", {"compat.tensorflow"}),
    (r"^\s*(import|from) keras\.src", {"compat.keras"}),
    # The names of the project's variables meet the environment in one place; others pass them on by name.
    (r"environ(\.get\(|\[)(\w+\.)?(\"KERAS_DDL_|PREFIX|environment_name|variable)", {"config"}),
]


def inside(project: Project) -> list[str]:
    """The modules of keras_ddl but the package itself."""
    return sorted(set(project.modules) - {"keras_ddl"})


def folder_of(module: str) -> str:
    return module.split(".")[1]


def imports_point_one_way(project: Project) -> Iterator[Finding]:
    """A module imports from its own folder, and from folders of lines above that of its own; see LINE."""
    for name in inside(project):
        path, folder = project.modules[name], folder_of(name)
        if folder not in PLACE:
            yield Finding(path, 1, "the folder has no place in LINE of tools/structure/layers.py")
            continue
        for target, line in project.imports_of(name).items():
            if target == "keras_ddl":
                if folder != "cli" and folder not in FOLDERS:  # the package's names lead to everything
                    yield Finding(path, line, "imports from keras_ddl/__init__.py, which imports it")
                continue
            if (folder, folder_of(target)) in BETWEEN_PARTS or (
                name in FOR_TYPE_CHECKERS and folder_of(target) in FOLDERS
            ):
                continue
            place = PLACE.get(folder_of(target), -1)  # without one: found in that folder
            if place > PLACE[folder]:
                yield Finding(path, line, f"imports {target}, from further along the line")
            if place == PLACE[folder] and folder_of(target) != folder:
                yield Finding(path, line, f"imports {target}, of a folder of its own line: those stand side by side")


def folders_beside_each_other_import_one_way(project: Project) -> Iterator[Finding]:
    """Folders in the same folder of the core do not import one another in a circle."""
    imports: dict[str, dict[str, dict[str, Finding]]] = {}  # folder -> folder in it -> folder beside that, and where
    for name in inside(project):
        if folder_of(name) in FOLDERS:
            continue
        path = project.modules[name]
        words = (name if path.stem == "__init__" else name.rpartition(".")[0]).split(".")
        for depth in range(2, len(words)):
            above, own = ".".join(words[:depth]), ".".join(words[: depth + 1])
            of_own = imports.setdefault(above, {}).setdefault(own, {})
            for target, line in project.imports_of(name).items():
                there = ".".join(target.split(".")[: depth + 1])
                if target.startswith(f"{above}.") and there != own:
                    of_own.setdefault(there, Finding(path, line, f"imports {there}, which is in a circle of folders"))
    for folders in imports.values():
        for own, others in circles({own: set(found) for own, found in folders.items()}).items():
            yield from (folders[own][other] for other in sorted(others))


def no_circle_of_imports(project: Project) -> Iterator[Finding]:
    """No two modules import one another, by whatever way.

    Imports inside functions count too: they only put a circle off. Left out are the package itself, whose names are
    imported on first use, and that importing a submodule also runs its package's __init__, which imports its parts.
    """
    targets = {name: set(project.imports_of(name)) - {"keras_ddl"} for name in inside(project)}
    for name, others in circles(targets).items():
        yield Finding(project.modules[name], 1, f"in a circle of imports, or above one, with {sorted(others)}")


def distribute_loop_is_entered_by_the_strategy(project: Project) -> Iterator[Finding]:
    """Of the modules outside of keras_ddl.strategy.distribute_loop only keras_ddl.strategy itself imports from it."""
    room = {name for name in project.modules if name == ROOM or name.startswith(f"{ROOM}.")}
    if not room > {ROOM}:
        yield Finding(project.root, 1, f"{ROOM} is no folder of modules: change this rule")
    users = {name for name in inside(project) if name not in room and set(project.imports_of(name)) & room}
    for name in users ^ {"keras_ddl.strategy"}:
        does = "imports" if name in users else "does not import"
        yield Finding(project.modules.get(name, project.root), 1, f"{does} {ROOM}: the strategy does, nobody else")


def modules_beside_the_folders_are_what_users_import(project: Project) -> Iterator[Finding]:
    """The modules beside the folders of keras_ddl/ are those that users import by name; see BESIDE."""
    beside = {path.stem for path in (project.root / "keras_ddl").glob("*.py")}
    for name in sorted(beside ^ BESIDE):
        state = "lies" if name in beside else "does not lie"
        yield Finding(project.root / "keras_ddl" / f"{name}.py", 1, f"{state} beside the folders; BESIDE lists those")


def private_interfaces_have_one_home(project: Project) -> Iterator[Finding]:
    """ctypes, tensorflow.python, keras.src and the project's environment variables are used in their HOMES only."""
    for pattern, names in HOMES:
        home = {f"keras_ddl.{name}" for name in names}
        for name, path in project.modules.items():
            lines = [line for line, _ in project.matches(path, pattern)]
            if lines and name not in home:
                yield Finding(path, lines[0], f"{pattern} belongs into {', '.join(sorted(home))}")
            if not lines and name in home:
                yield Finding(path, 1, f"{pattern} is no longer here: change HOMES")
        for name in sorted(home - project.modules.keys()):
            yield Finding(project.root, 1, f"{name} is gone: change HOMES")


RULES = (
    imports_point_one_way,
    folders_beside_each_other_import_one_way,
    no_circle_of_imports,
    distribute_loop_is_entered_by_the_strategy,
    modules_beside_the_folders_are_what_users_import,
    private_interfaces_have_one_home,
)
