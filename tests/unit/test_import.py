"""What `import keras_ddl` costs and which module may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import keras_ddl

# Left may not import right. Names in one tuple stand at one place of the line.
LINE = (
    ("errors", "config", "_durable"),
    ("topology",),
    ("_environment",),
    ("_native",),
    ("_mpi",),
    ("_error_report",),
    ("communicator",),
    ("launch",),
    ("_tf_compat",),
    ("ops", "ops_gradients"),
    ("bucket",),
    ("data",),
    ("strategy", "_keras_compat"),
    ("schedules",),
    ("checkpoint",),
    ("export",),
    ("callbacks",),
    ("cli",),
)
PLACE = {name: place for place, names in enumerate(LINE) for name in names}


def source_files():
    package = Path(keras_ddl.__file__).parent
    yield from package.rglob("*.py")
    if (package.parent / "native").exists():
        yield from (package.parent / "export").rglob("*.py")


def part_of(path: Path) -> str:
    package = Path(keras_ddl.__file__).parent
    parent = package if path.is_relative_to(package) else package.parent
    return path.relative_to(parent).parts[0].removesuffix(".py")


def imported_parts(path: Path):
    """Yields (part of keras_ddl, line) for every import in the file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            assert not isinstance(node, ast.ImportFrom), f"{path}:{node.lineno}: write imports in full"
            continue
        for name in names:
            words = name.split(".")
            if words[0] == "keras_ddl" and len(words) > 1:
                yield words[1], node.lineno


def test_imports_point_left():
    wrong = []
    for path in source_files():
        part = part_of(path)
        if part == "__init__":
            continue
        assert part in PLACE, f"{part} has no place in the line of imports"
        for other, line in imported_parts(path):
            if other in PLACE and PLACE[other] > PLACE[part]:
                wrong.append(f"{path}:{line} imports {other}")
    assert not wrong, wrong


def test_import_is_lazy():
    code = (
        "import sys, keras_ddl; "
        "heavy = {'tensorflow', 'keras', 'mpi4py', 'numpy', 'ctypes'} & set(sys.modules); "
        "assert not heavy, heavy; dir(keras_ddl); keras_ddl.errors; keras_ddl.topology; keras_ddl.init; "
        "heavy = {'tensorflow', 'keras', 'mpi4py'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_listed_and_an_unknown_one_is_an_attribute_error():
    assert set(keras_ddl.__all__) <= set(dir(keras_ddl))
    assert len(set(keras_ddl.__all__)) == len(keras_ddl.__all__)
    assert set(keras_ddl._HOME_OF) | set(keras_ddl._MODULES) <= set(keras_ddl.__all__)
    assert not hasattr(keras_ddl, "world_size")


def test_topology_stays_a_function_beside_the_module_of_that_name():
    import keras_ddl.communicator
    from keras_ddl.topology import Topology

    assert callable(keras_ddl.topology)
    assert Topology.__module__ == "keras_ddl.topology"
