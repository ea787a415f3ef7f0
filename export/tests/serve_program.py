"""Runs rows.npz of each model under argv[1] through the SavedModels in argv[2], without Keras and keras_ddl."""

from __future__ import annotations

import importlib.abc
import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

BLOCKED = ("keras", "tf_keras", "keras_ddl")
for name in [name for name in sys.modules if name.partition(".")[0] in BLOCKED]:
    del sys.modules[name]


class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
largest = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    served = tf.saved_model.load(str(Path(sys.argv[2]) / folder.name / "1"))
    function = served.signatures["serving_default"]
    with np.load(folder / "rows.npz") as rows, np.load(folder / "expected.npz") as expected:
        answers = function(**{key: tf.constant(rows[key]) for key in rows.files})
        assert set(answers) >= set(expected.files), (folder.name, set(answers), expected.files)
        largest[folder.name] = max(
            float(np.max(np.abs(answers[key].numpy() - expected[key]))) for key in expected.files
        )
print("results:" + json.dumps({"largest": largest, "imported": sorted(set(BLOCKED) & set(sys.modules))}))
