"""A table saved in parts, one per rank: an export holds all rows and never loads the whole table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from harness.rank_tests import run_ranks
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.bundle_index import stored_boxes
from keras_ddl.export import export_saved_model
from keras_ddl.export.sources import weights

ROWS, WIDTH, RANKS = 301, 8, 2
PROGRAM = f"""
import sys
import keras
import numpy as np
import keras_ddl

strategy = keras_ddl.Strategy(sharding="weights")
keras.utils.set_random_seed(1)
with strategy.scope():
    ids = keras.Input((4,), dtype="int32", name="ids")
    rows = keras.layers.Embedding({ROWS}, {WIDTH}, name="table")(ids)
    model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
x = 7 * np.arange(80).reshape(20, 4) % {ROWS}
saves = keras_ddl.callbacks.Checkpoint(sys.argv[1] + "/ckpt")
model.fit(x, np.ones((20, 2)), batch_size=10, epochs=2, verbose=0, callbacks=[saves])
answers = model.predict(x, verbose=0)
if strategy.rank == 0:
    np.savez(sys.argv[1] + "/answers.npz", x=x, y=answers)
"""


@pytest.mark.parallel
def test_table_in_parts_is_exported_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    run_ranks(tmp_path / "train.py", RANKS, args=[tmp_path], env={"KERAS_DDL_SHARD_FROM_ELEMENTS": "100"}).check()
    monkeypatch.setattr(weights, "_GROUP_BYTES", 1000)
    written: list[int] = []

    def write(prefix: str, tensors: Any, parts: Any = None) -> None:
        written.extend(int(tf.size(each)) for each in tensors.values())
        written.extend(int(tf.size(each.values)) for each in (parts or {}).values())
        plain_write(prefix, tensors, parts)

    plain_write = bundle.write
    monkeypatch.setattr(bundle, "write", write)
    made = export_saved_model(tmp_path / "ckpt", tmp_path / "out")
    assert "as the trained model did" in made.proof
    assert max(written) == -(-ROWS // RANKS) * WIDTH
    (boxes,) = (each for each in stored_boxes(f"{made.path}/variables/variables").values() if len(each) > 1)
    assert boxes == [((0, 151), (0, WIDTH)), ((151, 150), (0, WIDTH))]
    served = tf.saved_model.load(str(made.path)).signatures["serving_default"]
    with np.load(tmp_path / "answers.npz") as expected:
        (answers,) = served(ids=tf.constant(expected["x"], tf.int32)).values()
        np.testing.assert_allclose(answers, expected["y"], rtol=1e-6)
