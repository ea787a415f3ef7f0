"""The README of strategy/keras_patches lists what is replaced in Keras and TensorFlow, in processes of their own."""

import ast
import re

import pytest

from harness.rank_tests import run_ranks
from harness.source_modules import MODULES, ROOT

_PAGE = ROOT / "keras_ddl" / "strategy" / "keras_patches" / "README.md"
# Where programs look for the mathematics: none of it is ours to change.
_UNTOUCHED = ("losses", "metrics", "optimizers", "layers", "random", "ops")
# A class that cannot work under this Strategy says so when it is made.
_REFUSED = "tensorflow.python.distribute.failure_handling.failure_handling.PreemptionCheckpointHandler.__init__"


def listed():
    """When -> names, of the table on the page; each row's number is that of its names."""
    rows = {}
    for line in _PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and (cells := [cell.strip() for cell in line.strip("|").split("|")])[1].isdigit():
            rows[cells[0]] = re.findall(r"`([\w.]+)`", cells[2])
            assert len(rows[cells[0]]) == int(cells[1]), line
    return rows


def attributes():
    """id -> (name, module or class, its attributes), of all that is loaded of Keras and TensorFlow."""
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
    return "keras_ddl" in where.rpartition("site-packages")[2].split("/")


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
    """Class.method, of single objects of Keras and TensorFlow in which keras_ddl has replaced a method."""
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
    """Class.method, of private methods of callbacks whose class keras_ddl has exchanged."""
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
def test_a_strategy_replaces_what_the_page_lists_and_no_mathematics(tmp_path):
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
    assert once == sorted(rows["the first Strategy: what writes files besides models"])
    of_callbacks = next(names for when, names in rows.items() if when.startswith("a fit: private methods of single"))
    assert set(results[1][-1]) == set(of_callbacks)
    assert short(plain) == set(rows["the first Strategy"])
    assert short(with_shards) - short(plain) == set(rows["the first that shards optimizers or has a layout"])
    assert {name for _, _, fitted, *_ in results for name in fitted} == set(rows["a fit: methods of single objects"])
    assert set(built_later) == set(rows["a fit that resumes inside an epoch: methods of single objects"])
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
    of_strategy = set(rows["the first Strategy"])
    assert short(of_horovod) - of_strategy == set(rows["Horovod's: `init` and the first DistributedOptimizer"])
    assert of_strategy - short(of_horovod) == short([_REFUSED])
    of_each = "Horovod's: methods of each DistributedOptimizer of"
    assert of_optimizer == [f"SGD.{name}" for name in sorted(rows[f"{of_each} Keras"])]
    assert of_graph_optimizer == [f"AdamOptimizer.{name}" for name in sorted(rows[f"{of_each} tf.compat.v1.train"])]
    ddls = set(rows["DDL's, by `ddl.init` on several ranks"])
    assert short(of_ddl) == ddls - short(of_horovod)  # sessions are changed alike by both


def test_classes_of_objects_are_exchanged_where_the_page_lists():
    exchanged = [
        f"{name}, line {node.lineno}"
        for name, path in MODULES.items()
        if name != "keras_ddl.compat.replacing"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    ]
    assert len(exchanged) == len(listed()["a fit or a scope: classes of single objects"]), exchanged


def test_private_attributes_are_set_where_the_page_lists():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items() if ".compat" in name]
    written = {
        f"{ast.unparse(node.value)}.{node.attr}"
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and re.match(r"_(?!_)", node.attr)
    }
    listed_here = set(listed()["private attributes of single objects, given other values"])
    assert {each for each in written if not each.startswith("self.")} == listed_here


@pytest.mark.long
def test_private_methods_of_derived_classes_are_those_that_the_page_lists():
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
    assert set(written) == set(listed()["classes of keras_ddl's that are derived from theirs: private methods"])


def test_values_of_tensorflow_are_replaced_where_the_page_lists():
    tree = ast.parse(MODULES["keras_ddl.compat.tensorflow"].read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorflow.python")
        for alias in node.names
    }
    replaced = {
        f"{imported[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in imported
    }
    assert replaced == set(listed()["TensorFlow's own values"])


@pytest.mark.long
def test_nothing_is_replaced_without_a_strategy():
    def changes():
        import contextlib

        import keras  # noqa: F401
        import tensorflow  # noqa: F401

        before = attributes()
        import keras_ddl

        for name in keras_ddl.__all__:  # whatever importing it brings
            getattr(keras_ddl, name)
        keras_ddl.init()
        train(contextlib.nullcontext())
        return replaced_since(before), replaced_on_objects()

    assert run_ranks(changes, 1).check().ranks[0].result == ([], [])
