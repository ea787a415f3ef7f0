"""Acts when a program that is verified has imported Keras, and keras_ddl's Strategy, before the program goes on."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from keras_ddl import config
from keras_ddl.verify.recording import Plan


def begin() -> None:
    """Seeds Python's and NumPy's generators, and waits for the imports.

    Does nothing unless KERAS_DDL_VERIFY_DIR is set.
    """
    folder = config.get("VERIFY_DIR")
    if folder is None:
        return
    plan = Plan.read(Path(folder))
    random.seed(plan.seed)
    import numpy as np

    np.random.seed(plan.seed)

    def set_up_keras() -> None:
        keras = sys.modules["keras"]
        if keras.config.backend() != "tensorflow":
            return  # which keras_ddl refuses, in its own words
        if plan.floatx:
            keras.config.set_floatx(plan.floatx)
        from keras_ddl.compat import tensorflow as tf_compat

        # The program may have drawn numbers, or set seeds.
        states = random.getstate(), np.random.get_state(), tf_compat.global_seed()
        keras.utils.set_random_seed(plan.seed)
        random.setstate(states[0])
        np.random.set_state(states[1])
        if states[2] is not None:
            tf_compat.tf.random.set_seed(states[2])

    def follow() -> None:
        from keras_ddl.verify import recorder

        recorder.begin(Path(folder), plan)

    sys.meta_path.insert(0, _AfterImport({"keras": set_up_keras, "keras_ddl.strategy": follow}))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, when a module has been imported."""

    def __init__(self, calls: Mapping[str, Callable[[], None]]) -> None:
        self._calls = dict(calls)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        call = self._calls.pop(name, None)
        if call is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, call)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The loader of a module, and what is called after it."""

    def __init__(self, loader: importlib.abc.Loader, call: Callable[[], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # as the module will see it
        self._loader.exec_module(module)
        self._call()
