"""What a Strategy changes in Keras and TensorFlow, counted in a process of its own."""

import json

from harness.rank_tests import run_ranks

_MOST = 25
# Where programs look for the mathematics: none of it is ours to change.
# A class that cannot work under this Strategy says so when it is made.
_REFUSED = "tensorflow.python.distribute.failure_handling.failure_handling.PreemptionCheckpointHandler.__init__"
_UNTOUCHED = ("losses", "metrics", "optimizers", "layers", "random", "ops")


def test_strategy_replaces_few_attributes_and_no_mathematics():
    def changes():
        import json
        import sys

        import keras
        import tensorflow

        import keras_ddl

        def owners():
            modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("keras", "tensorflow")]
            found = {id(m): (m.__name__, m) for m in modules if hasattr(m, "__name__")}
            for module in modules:
                for value in list(getattr(module, "__dict__", {}).values()):
                    if isinstance(value, type) and value.__module__.split(".")[0] in ("keras", "tensorflow"):
                        found[id(value)] = (f"{value.__module__}.{value.__qualname__}", value)
            return found

        make_strategy = keras_ddl.Strategy  # with all that its import brings
        before = {key: (name, owner, dict(vars(owner))) for key, (name, owner) in owners().items()}
        strategy = make_strategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse", metrics=["mae"])
        model.fit(tensorflow.zeros([8, 3]), tensorflow.zeros([8, 2]), batch_size=4, verbose=0)

        def is_of_keras_ddl(value):
            value = value.fget if isinstance(value, property) else value
            code = getattr(value, "__code__", None)  # functools.wraps copies the module's name
            where = code.co_filename if code is not None else str(getattr(value, "__module__", "")).replace(".", "/")
            return "keras_ddl" in where.rpartition("site-packages")[2].split("/")

        replaced = [
            f"{name}.{attribute}"
            for name, owner, held in before.values()
            for attribute, value in vars(owner).items()
            if value is not held.get(attribute) and is_of_keras_ddl(value)
        ]
        return json.dumps(sorted(set(replaced)))

    outcome = run_ranks(changes, 2).check()
    replaced = json.loads(outcome.ranks[0].result)
    assert "keras.src.trainers.trainer.Trainer.compile" in replaced  # the count sees what is there
    assert len(replaced) <= _MOST, replaced
    inside = [name for name in replaced if any(f".{each}." in name for each in _UNTOUCHED)]
    inside += [name for name in replaced if name.startswith("tensorflow") and name != _REFUSED]
    assert not inside, inside
