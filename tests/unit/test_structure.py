"""Each rule of tools/structure, which `make lint` checks, fails on a file that breaks it, and on no other file."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness import name_tables
from harness.needed_parts import needs_part
from harness.source_modules import ROOT, structure

layers, native_layers, pages, private_reads, tests = (
    structure(name) for name in ("layers", "native_layers", "pages", "private_reads", "tests")
)
sources, program = structure("sources"), structure("__main__")
CORE = "native/core/src"

# Rule -> files. Files under "bad" are added to the others, and the rule must report them.
CASES: Mapping[str, tuple[object, dict[str, str], dict[str, str]]] = {
    "back along the line": (
        layers.imports_point_one_way,
        {"keras_ddl/ops/__init__.py": "", "keras_ddl/strategy/__init__.py": ""},
        {"keras_ddl/ops/bad.py": "if 1:\n    from keras_ddl import strategy"},
    ),
    "beside on the line": (
        layers.imports_point_one_way,
        {"keras_ddl/ops/__init__.py": ""},
        {"keras_ddl/device/bad.py": "def f():\n    from keras_ddl.ops import g"},
    ),
    "the package itself": (
        layers.imports_point_one_way,
        {"keras_ddl/__init__.py": ""},
        {"keras_ddl/ops/bad.py": "import keras_ddl"},
    ),
    "cycle of folders": (
        layers.sibling_folders_import_one_way,
        {
            "keras_ddl/cut/__init__.py": "from keras_ddl.cut.building import builder",
            "keras_ddl/cut/building/builder.py": "from keras_ddl.cut.analysis import program",
            "keras_ddl/cut/analysis/program.py": "",
        },
        {"keras_ddl/cut/analysis/bad.py": "from keras_ddl.cut.building import builder"},
    ),
    "no place": (layers.imports_point_one_way, {}, {"keras_ddl/new/bad.py": ""}),
    "cycle": (
        layers.no_import_cycles,
        {"keras_ddl/ops/__init__.py": "", "keras_ddl/ops/good.py": ""},
        {"keras_ddl/ops/one.py": "from keras_ddl.ops import two", "keras_ddl/ops/two.py": "from . import one"},
    ),
    "the room": (
        layers.distribute_loop_is_entered_by_the_strategy,
        {
            "keras_ddl/strategy/__init__.py": "from keras_ddl.strategy.distribute_loop import loop",
            "keras_ddl/strategy/distribute_loop/__init__.py": "",
            "keras_ddl/strategy/distribute_loop/loop.py": "",
        },
        {"keras_ddl/cut/bad.py": "from keras_ddl.strategy.distribute_loop.loop import run"},
    ),
    "beside the folders": (
        layers.top_level_modules_are_public,
        {f"keras_ddl/{name}.py": "" for name in layers.BESIDE},
        {"keras_ddl/bad.py": ""},
    ),
    "private interfaces": (
        layers.private_interfaces_have_one_home,
        {},
        {
            "keras_ddl/ops/ctypes.py": "import ctypes",
            "keras_ddl/ops/tensorflow.py": "tf.python.x",
            "keras_ddl/ops/keras.py": "from keras.src import x",
            "keras_ddl/ops/environment.py": 'os.environ.get("KERAS_DDL_MODE")',
        },
    ),
    "private": (
        private_reads.private_parts_are_read_in_compat,
        {"keras_ddl/compat/models.py": "model._flatten_layers()"},
        {"keras_ddl/ops/bad.py": "\nmodel._flatten_layers()"},
    ),
    "unlisted folder or short include": (
        native_layers.sources_lie_in_listed_folders,
        {f"{CORE}/{folder}/a.h": "" for folder in native_layers.FOLDERS},
        {f"{CORE}/new/bad.h": "", f"{CORE}/shm/bad.h": '#include "a.h"'},
    ),
    "later folder": (
        native_layers.includes_point_up,
        {f"{CORE}/shm/a.h": "", f"{CORE}/net/a.h": '#include "shm/a.h"'},
        {f"{CORE}/shm/bad.cc": '#include "ddl.h"\n#include "net/a.h"'},
    ),
    "native cycle": (
        native_layers.no_include_cycles,
        {f"{CORE}/shm/a.h": ""},
        {f"{CORE}/shm/b.h": '#include "shm/c.h"', f"{CORE}/shm/c.h": '#include "shm/b.h"'},
    ),
    "foreign header": (
        native_layers.layers_stay_apart,
        {f"native/{folder}/a.h": "" for folder in native_layers.FORBIDDEN},
        {"native/core/bad.h": "#include <mpi.h>", "native/tf/bad.h": "#include <Python.h>"},
    ),
    "catches by itself": (
        native_layers.exceptions_are_caught_only_in_guard,
        {f"{CORE}/base/guard.h": "try {} catch (const std::exception&) {}"},
        {f"{CORE}/shm/bad.cc": "try {} catch (const std::bad_alloc&) {}"},
    ),
    "no such file": (
        pages.pages_name_existing_files,
        {"docs/a.md": "`docs/a.md`\n```\n`docs/none.md`\n```\n`core/ring.cc`", "native/core/ring.cc": ""},
        {"README.md": "```sh\n```\nSee `python docs/none.md`.", "docs/bad.md": "`net/ring.cc`"},
    ),
    "the READMEs of folders": (
        pages.readmes_list_the_files_of_their_folders,
        {f"keras_ddl/{folder}/{name}": "- `a.py`: sums" for folder in ("ops", "cut") for name in ("a.py", "README.md")},
        {"keras_ddl/ops/README.md": "nothing", "keras_ddl/cut/README.md": "- `a.py`: sums\n- `b.py`: none"},
    ),
    "the READMEs of native folders": (
        pages.readmes_list_the_files_of_their_folders,
        {f"{CORE}/README.md": "- `net/`, `shm/`", f"{CORE}/net/README.md": "- `a.h`: sums\n- `b.cc`, `c.cc`: means"}
        | {f"{CORE}/{name}": "" for name in ("net/a.h", "net/a.cc", "net/b.cc", "net/c.cc", "shm/a.h")},
        {f"{CORE}/README.md": "- `net/`", f"{CORE}/shm/README.md": "a.h: sums"},
    ),
    "the picture": (
        pages.picture_names_existing_folders,
        {"docs/a.md": "", "docs/pictures/the_line.svg": '<text class="path">docs</text>\n' * 11},
        {"docs/pictures/the_line.svg": '<text class="path">none</text>\n' * 11},
    ),
    "link to no file or heading": (
        pages.links_have_targets,
        {"docs/a.md": "# A b, c\n[to it](#a-b-c) [out](https://example.org/none)"},
        {"README.md": "[a](docs/none.md)", "docs/bad.md": "[a](a.md#b)"},
    ),
    "link of figures or of an example": (
        pages.links_have_targets,
        {"docs/a.md": "# A", "examples/b/README.md": "[a](../../docs/a.md#a)"},
        {"benchmarks/results/b.md": "[a](a.md)"},
    ),
    "install by name": (
        pages.no_text_installs_by_bare_name,
        {"docs/a.md": "pip install '.[cpu]'\npip install 'keras_ddl-0.1.0-py3-none-any.whl[cpu]'\n"
                      "pip install /wheels/keras_ddl/\n`pip install .` and `import keras_ddl`"},
        {"README.md": "pip install keras_ddl", "b.md": "pip install 'keras_ddl[cpu]'",
         "c.md": 'pip install -U "keras-ddl[cpu,dev]" numpy'},
    ),
    "benchmarks imported": (
        tests.tests_do_not_import_benchmarks,
        {"benchmarks/_part.py": "", "tests/project/benchmarks/test_a.py": "import _part"},
        {"tests/ops/bad.py": "def f():\n    from _part import g",
         "tests/harness/bad.py": 'ROOT / "benchmarks" / "x.py"'},
    ),
}  # fmt: skip


def write_project(folder: Path, files: dict[str, str]) -> object:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return sources.Project(folder)


@pytest.mark.parametrize("case", CASES)
def test_rule_finds_its_violation(case: str, tmp_path: Path) -> None:
    rule, good, bad = CASES[case]
    before = set(rule(write_project(tmp_path, good)))
    blamed = {each.path for each in before if each.text != pages.TOO_FEW}
    assert not blamed & {tmp_path / name for name in good}
    found = set(rule(write_project(tmp_path, bad))) - before
    assert {str(each.path.relative_to(tmp_path)) for each in found if each.path.is_file()} >= set(bad)
    for each in found:
        words = bad.get(str(each.path.relative_to(tmp_path)), "").splitlines()
        assert each.line == 1 or words[each.line - 1].strip()


def test_every_rule_has_a_docstring_and_a_case() -> None:
    assert all(rule.__doc__ for rule in program.RULES)
    tried = {rule for rule, _, _ in CASES.values()} | {tests.name_tables_agree}
    assert set(program.RULES) == tried


def test_private_reads_are_found() -> None:
    project = sources.Project(ROOT)

    def seen(text: str, module: str) -> list[object]:
        tree = ast.parse(text)
        return [*private_reads.private_reads(project, module, tree), *private_reads.internal_modules(tree)]

    for text in (
        "model._flatten_layers()",
        "[each for each in optimizer._trainable_variables]",
        "getattr(callback, '_should_save_model', None)",
        "self._container_strategy()",
        "layer._non_trainable_variables = []",
        "from keras.src.trainers import trainer",
        "import tensorflow.python.eager.context as context",
        "tf.python.framework.ops.Graph",
        "importlib.import_module('keras.src.utils')",
    ):
        assert seen(text, "keras_ddl.strategy.calls.fits"), text
    for text in ("self._of_one_rank()", "tape._ddl_reduction", "os._exit(1)", "model.__dict__"):
        assert not seen(text, "keras_ddl.strategy.keras_patches.callbacks"), text


@needs_part("horovod")
def test_page_of_names_that_differs_from_its_checks_is_found(tmp_path: Path) -> None:
    table = name_tables.TABLES[0]
    assert list(tests.table_agrees(table)) == []
    page = tmp_path / table.page.name
    page.write_text(table.page.read_text(encoding="utf-8").replace("works", "fails", 1))
    (found,) = tests.table_agrees(dataclasses.replace(table, page=page))
    assert "is not what its rows give" in found.text
    data = tmp_path / table.data.name
    data.write_text(table.data.read_text().replace('"shutdown"', '"shut_down"', 1))
    texts = " ".join(each.text for each in tests.table_agrees(dataclasses.replace(table, data=data)))
    assert "shut_down has no check" in texts and "shutdown, which has a check, is no name" in texts


def test_lint_names_file_line_and_rule_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_project(tmp_path, {"README.md": "\npip install keras_ddl"})
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "RULES", (pages.no_text_installs_by_bare_name,))
    assert program.main() == 1
    assert capsys.readouterr().out == "README.md:2: pip install keras_ddl: the project is in no index\n"
    (tmp_path / "README.md").write_text("pip install .")
    assert program.main() == 0
