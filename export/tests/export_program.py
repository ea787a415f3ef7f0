"""Exports every checkpoint directory under argv[1] to argv[2], in a process where Keras cannot be imported."""

from __future__ import annotations

import importlib.abc
import json
import sys
from pathlib import Path

import tensorflow  # noqa: F401  (first, because TensorFlow looks for Keras when it is imported)

for name in [name for name in sys.modules if name.partition(".")[0] in ("keras", "tf_keras")]:
    del sys.modules[name]


class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("keras", "tf_keras"):
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
from keras_ddl.export import export_saved_model  # noqa: E402

results = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    result = export_saved_model(folder, Path(sys.argv[2]) / folder.name, validate="here", model_name=folder.name)
    results[folder.name] = {"path": str(result.path), "proof": result.proof, "step": result.step}
print("results:" + json.dumps(results))
