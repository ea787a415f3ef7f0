"""The README of strategy/keras_patches lists all replacements in Keras and TensorFlow; checked in child processes."""

import ast
import re

import pytest

from harness.rank_tests import run_ranks
from harness.source_modules import MODULES, ROOT
from keras_ddl.parts import FOLDERS

_PAGE = ROOT / "keras_ddl" / "strategy" / "keras_patches" / "README.md"
# Modules with the mathematics, none of which keras_ddl may change.
_UNTOUCHED = ("losses", "metrics", "optimizers", "layers", "random", "ops")
# A class that cannot work under this Strategy raises when it is constructed.
_REFUSED = "tensorflow.python.distribute.failure_handling.failure_handling.PreemptionCheckpointHandler.__init__"


def listed():
    """Returns the names in each table on the page, by "section: title of the table's first column"."""
    tables, section, before = {}, "", ""
    for line in _PAGE.read_text(encoding="utf-8").partition("## What is replaced")[2].splitlines():
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        if line.startswith("### "):
            section = line.removeprefix("### ")
        elif first.startswith("---"):
            names = tables[f"{section}: {before}"] = []
        elif first and before:
            names += re.findall(r"`([\w.]+)`", first)
        before = first
    return tables


def attributes():
    """Returns id -> (name, module or class, its attributes) for all loaded parts of Keras and TensorFlow."""
    import sys

    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("keras", "tensorflow")]
    found = {id(m): (m.__name__, m) for m in modules if hasattr(m, "__name__")}
    for module in modules:
        for value in list(getattr(module, "__dict__", {}).values()):
            if isinstance(value, type) and value.__module__.split(".")[0] in ("keras", "tensorflow"):
                found[id(value)] = (f"{value.__module__}.{value.__qualname__}", value)
    return {key: (name, owner, dict(vars(owner))) for key, (name, owner) in found.items()}


def is_of_keras_ddl(value):
    value = value.fget if isinstance(value, property) else getattr(value, "func", value)  # of a functools.partial
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)  # functools.wraps copies the module's name
    where = code.co_filename if code is not None else str(getattr(value, "__module__", "")).replace(".", "/")
    inside = "/" + where.rpartition("site-packages")[2]
    return any(f"/{folder}/" in inside for folder in ("keras_ddl", *FOLDERS.values()))  # the latter in a checkout


def is_written_once(value):
    held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    functions = [getattr(each, "func", None) for each in held]
    return any(str(getattr(each, "__module__", "")).endswith(".other_files") for each in functions)


def replaced_since(before):
    return sorted(
        {
            f"{name}.{attribute}"
            for name, owner, held in before.values()
            for attribute, value in vars(owner).items()
            if value is not held.get(attribute) and is_of_keras_ddl(value)
            if not is_written_once(value)
        }
    )


def replaced_on_objects():
    """Returns Class.method for single objects of Keras and TensorFlow in which keras_ddl has replaced a method."""
    import gc

    found = set()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).split(".")[0] in ("keras", "tensorflow") and not isinstance(each, type):
            for name, value in list(getattr(each, "__dict__", {}).items()):
                if callable(value) and hasattr(kind, name) and is_of_keras_ddl(value):
                    found.add(f"{kind.__name__}.{name}")
    return sorted(found)


def replaced_on_callbacks():
    """Returns Class.method for private methods of callbacks whose class keras_ddl has exchanged."""
    import gc

    found = set()
    for each in gc.get_objects():
        own = vars(type(each)).get("keras_ddl_own_class")
        for base in () if own is None else type(each).__mro__:
            for name in vars(base) if base not in own.__mro__ else ():
                homes = [kind.__name__ for kind in own.__mro__ if name in vars(kind)]
                if re.match(r"_(?!_)", name):
                    found.add(f"{homes[0]}.{name}")
    return sorted(found)


def short(names):
    return {".".join(name.split(".")[-2:]) for name in names}


def train(scope, data=None, callbacks=(), epochs=2, **optimizer):
    import keras
    import tensorflow

    with scope:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, **optimizer), "mse", metrics=["mae"])
    if data is None:
        data = tensorflow.data.Dataset.from_tensors((tensorflow.zeros([4, 3]), tensorflow.zeros([4, 2]))).repeat(2)
    model.fit(data, verbose=0, epochs=epochs, callbacks=list(callbacks))


@pytest.mark.long
def test_strategy_replaces_only_what_the_page_lists(tmp_path):
    def changes(folder):
        import keras
        import numpy
        import tensorflow  # noqa: F401

        before = attributes()
        import keras_ddl
        from keras_ddl.compat import models
        from keras_ddl.strategy.keras_patches import other_files

        class Look(keras.callbacks.Callback):
            seen: set = set()
            on_callbacks: set = set()

            def on_epoch_begin(self, epoch, logs=None):
                self.seen.update(replaced_on_objects())
                self.on_callbacks.update(replaced_on_callbacks())

        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return numpy.zeros([4, 3]), numpy.zeros([4, 2])

            def on_epoch_end(self):
                pass

        train(keras_ddl.Strategy().scope())
        plain = replaced_since(before)
        strategy = keras_ddl.Strategy(sharding="optimizer")
        callbacks = [
            Look(),
            keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras"),
            keras.callbacks.SwapEMAWeights(),
        ]
        train(strategy.scope(), Batches(), callbacks, use_ema=True)
        fitted = sorted(Look.seen)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse", metrics=["mae"])
        for part in models.compiled_parts(model).values():
            models.after_build(part, lambda: None)
        with_shards = replaced_since(before)
        built_later = sorted(set(replaced_on_objects()) - set(fitted))

        class Points(keras.callbacks.TensorBoard):
            pass

        train(strategy.scope(), callbacks=[Look(), Points(folder)])
        assert replaced_since(before) == with_shards
        return plain, with_shards, fitted, built_later, sorted(other_files.ONCE), sorted(Look.on_callbacks)

    results = [rank.result for rank in run_ranks(changes, 2, args=[str(tmp_path)]).check().ranks]
    rows = listed()
    plain, with_shards, _, built_later, once, _ = results[0]
    assert once == sorted(rows["The first Strategy: functions that write files besides models: replaced"])
    assert set(results[1][-1]) == set(rows["Each fit: private methods of single callbacks, until the next fit"])
    assert short(plain) == set(rows["The first Strategy: replaced"])
    assert short(with_shards) - short(plain) == set(rows["The first Strategy with shards or a layout: replaced"])
    assert {name for _, _, fitted, *_ in results for name in fitted} == set(rows["Each fit: methods of single objects"])
    assert set(built_later) == set(rows["Each fit: methods of single objects in a fit that resumes within an epoch"])
    inside = [name for name in plain if any(f".{each}." in name for each in _UNTOUCHED)]
    inside += [name for name in with_shards if name.startswith("tensorflow") and name != _REFUSED]
    assert not inside, inside


@pytest.mark.long
def test_front_ends_replace_what_the_page_lists():
    def changes():
        import keras
        import tensorflow

        before = attributes()
        import keras_ddl.horovod.keras as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        of_horovod, of_optimizer = replaced_since(before), replaced_on_objects()
        del optimizer
        optimizer = hvd.DistributedOptimizer(tensorflow.compat.v1.train.AdamOptimizer())
        of_graph_optimizer = sorted(set(replaced_on_objects()) - set(of_optimizer))
        del optimizer
        import ddl

        ddl.init("-mode p")
        of_ddl = sorted(set(replaced_since(before)) - set(of_horovod))
        return of_horovod, of_optimizer, of_graph_optimizer, of_ddl

    of_horovod, of_optimizer, of_graph_optimizer, of_ddl = run_ranks(changes, 2).check().ranks[0].result
    rows = listed()
    of_strategy = set(rows["The first Strategy: replaced"])
    assert short(of_horovod) - of_strategy == set(rows["Horovod: `init` and the first DistributedOptimizer"])
    assert of_strategy - short(of_horovod) == short([_REFUSED])
    of_each = "Horovod: methods of each DistributedOptimizer of"
    assert of_optimizer == [f"SGD.{name}" for name in sorted(rows[f"{of_each} Keras"])]
    assert of_graph_optimizer == [f"AdamOptimizer.{name}" for name in sorted(rows[f"{of_each} tf.compat.v1.train"])]
    ddls = set(rows["DDL: `ddl.init` on several ranks"])
    assert short(of_ddl) == ddls - short(of_horovod)  # both change sessions alike


def calls(tree, function):
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"replacing.{function}"
    ]


def test_classes_of_objects_are_exchanged_only_as_listed():
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    elsewhere = [
        f"{name}, line {node.lineno}"
        for name, tree in trees.items()
        if name != "keras_ddl.compat.replacing"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    ]
    assert not elsewhere
    exchanged = [f"{name}, line {each.lineno}" for name in trees for each in calls(trees[name], "exchange_class")]
    assert len(exchanged) == len(listed()["Classes of single objects: class"]), exchanged


def test_private_attributes_are_set_only_as_listed():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items() if ".compat" in name]
    written = {
        f"{ast.unparse(node.value)}.{node.attr}"
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and re.match(r"_(?!_)", node.attr)
    }
    listed_here = set(listed()["Private attributes of single objects: attribute"])
    assert {each for each in written if not each.startswith("self.")} == listed_here


@pytest.mark.long
def test_private_methods_are_overridden_only_as_listed():
    def overridden(names):
        import importlib

        found = set()
        for name in names:
            for kind in vars(importlib.import_module(name)).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    theirs = [each for each in kind.__mro__ if each.__module__.split(".")[0] in ("keras", "tensorflow")]
                    private = [each for each in vars(kind) if re.match(r"_(?!_|abc_|tf_|keras_)", each)]
                    found |= {
                        f"{kind.__name__}.{each}" for each in private if any(each in vars(base) for base in theirs)
                    }
        return sorted(found)

    elsewhere = ("torch", "serving", "launch", "cli", "doctor")  # no Keras there, or programs
    names = [name for name in MODULES if not name.startswith(tuple(f"keras_ddl.{each}" for each in elsewhere))]
    written = run_ranks(overridden, 1, args=[names]).check().ranks[0].result
    assert set(written) == set(listed()["Classes of keras_ddl that override private methods: methods"])


def test_tensorflow_values_are_replaced_only_as_listed():
    tree = ast.parse(MODULES["keras_ddl.compat.tensorflow"].read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorflow.python")
        for alias in node.names
    }
    assigned = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in imported
    ]
    assert not assigned
    rows = [row.elts for call in calls(tree, "set_values") for row in call.args[0].elts]
    replaced = {f"{imported[owner.id]}.{name.value}" for owner, name, _ in rows}
    assert replaced == set(listed()["Values of TensorFlow: value"])


@pytest.mark.long
def test_nothing_is_replaced_without_a_strategy():
    def changes():
        import contextlib

        import keras  # noqa: F401
        import tensorflow  # noqa: F401

        before = attributes()
        import keras_ddl

        for name in keras_ddl.__all__:  # all that importing it provides
            getattr(keras_ddl, name)
        keras_ddl.init()
        train(contextlib.nullcontext())
        return replaced_since(before), replaced_on_objects()

    assert run_ranks(changes, 1).check().ranks[0].result == ([], [])
