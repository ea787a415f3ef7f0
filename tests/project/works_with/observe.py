"""Runs a program as it stands, Keras in float64, and keeps what it leaves: observe.py FOLDER PROGRAM [ARGUMENT...].

Each rank writes FOLDER/<rank>.pickle: the weights of the program's `model`, its `history`, `outputs` and `written`.
"""

import contextlib
import pickle
import runpy
import sys
from pathlib import Path

import keras

keras.config.set_floatx("float64")
folder, program = Path(sys.argv[1]).absolute(), sys.argv[2]
sys.argv = sys.argv[2:]
left = runpy.run_path(program, run_name="__main__")

import keras_ddl  # noqa: E402

model, history, strategy = (left.get(name) for name in ("model", "history", "strategy"))
are_in_shards = model is not None and getattr(strategy, "job", None) is not None
with strategy.whole_model(model) if are_in_shards else contextlib.nullcontext():
    weights = None if model is None else [(each.path, each.numpy()) for each in model.weights]
seen = {
    "weights": weights,
    "history": None if history is None else history.history,
    **{name: left.get(name) for name in ("outputs", "written")},
}
rank = keras_ddl.rank() if keras_ddl.is_initialized() else 0
(folder / f"{rank}.pickle").write_bytes(pickle.dumps(seen))
