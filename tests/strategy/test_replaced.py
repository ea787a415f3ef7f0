"""What a Strategy changes in Keras and TensorFlow, counted in a process of its own; without one, nothing is changed."""

from harness.rank_tests import run_ranks

_MOST = 25
# Where programs look for the mathematics: none of it is ours to change.
# A class that cannot work under this Strategy says so when it is made.
_REFUSED = "tensorflow.python.distribute.failure_handling.failure_handling.PreemptionCheckpointHandler.__init__"
_UNTOUCHED = ("losses", "metrics", "optimizers", "layers", "random", "ops")


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
    value = value.fget if isinstance(value, property) else value
    code = getattr(value, "__code__", None)  # functools.wraps copies the module's name
    where = code.co_filename if code is not None else str(getattr(value, "__module__", "")).replace(".", "/")
    return "keras_ddl" in where.rpartition("site-packages")[2].split("/")


def replaced_since(before):
    return sorted(
        {
            f"{name}.{attribute}"
            for name, owner, held in before.values()
            for attribute, value in vars(owner).items()
            if value is not held.get(attribute) and is_of_keras_ddl(value)
        }
    )


def train(scope):
    import keras
    import tensorflow

    with scope:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", metrics=["mae"])
    model.fit(tensorflow.zeros([8, 3]), tensorflow.zeros([8, 2]), batch_size=4, verbose=0)


def test_strategy_replaces_few_attributes_and_no_mathematics():
    def changes():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401

        before = attributes()
        import keras_ddl

        train(keras_ddl.Strategy().scope())
        return replaced_since(before)

    replaced = run_ranks(changes, 2).check().ranks[0].result
    assert "keras.src.trainers.trainer.Trainer.compile" in replaced  # the count sees what is there
    assert len(replaced) <= _MOST, replaced
    inside = [name for name in replaced if any(f".{each}." in name for each in _UNTOUCHED)]
    inside += [name for name in replaced if name.startswith("tensorflow") and name != _REFUSED]
    assert not inside, inside


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
        return replaced_since(before)

    assert run_ranks(changes, 1).check().ranks[0].result == []
