"""StepMetrics on several ranks. Run by test_step_metrics.py."""

import os
import subprocess
import time
import warnings

import numpy as np

import keras_ddl
from keras_ddl import timeline
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, X, Y, keras, linear_model, shared_folder

BATCH = 10  # the last batch of 43 rows is smaller
LATE = 0.05


class Sleep(keras.callbacks.Callback):
    """Makes steps long enough to measure rates, and longer on the last rank."""

    never_stops_within_epoch = True

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.02 + LATE * (RANK == SIZE - 1 != 0))


def written(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["tensors"]
    return {tag: [(e.step, float(tf.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)] for tag in tags}


def check_step_metrics_on_a_full_disk_do_not_stop_training():
    if os.geteuid():
        return  # only root may mount a disk
    with shared_folder() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        disk = folder / f"disk{RANK}"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", disk], check=True)
        try:
            (disk / "full").write_bytes(bytes(4096))
            model = linear_model()
            metrics = keras_ddl.callbacks.StepMetrics(disk / "logs", every=1)
            history = model.fit(X, Y, batch_size=BATCH, epochs=30, verbose=0, callbacks=[metrics])
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
        assert len(history.history["loss"]) == 30
        lost = [str(each.message) for each in said if "StepMetrics writes nothing more" in str(each.message)]
        assert len(lost) == (RANK == 0), (lost, said)
        assert timeline.take() == [], "nothing is kept after the training"


def check_step_metrics_cover_the_job_and_are_written_by_rank_0():
    model = linear_model()
    with shared_folder() as folder:
        own = folder / f"rank{RANK}"
        metrics = keras_ddl.callbacks.StepMetrics(own, every=2)
        began = time.monotonic()
        model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[metrics, Sleep()])
        took = time.monotonic() - began
        assert own.exists() == (RANK == 0)
        assert timeline.take() == [], "nothing is kept after the training"
        if RANK != 0:
            return
        found = written(own)
    names = ("step_seconds", "rows_per_second", "exposed_communication_seconds", "input_wait_seconds")
    assert set(found) == {f"job/{name}" for name in names[: 4 if SIZE > 1 else 2]}, found
    steps = [step for step, _ in found["job/step_seconds"]]
    # The first step of the training is not counted; a point ends with its epoch.
    assert steps == [3, 5, 7, 9, 10, 12, 14, 15], steps
    seconds = dict(found["job/step_seconds"])
    rows = dict(found["job/rows_per_second"])
    # Two steps of 10 rows of all ranks; the last step of an epoch has 3 rows.
    np.testing.assert_allclose(rows[7] * 2 * seconds[7], 20, rtol=0.02)
    np.testing.assert_allclose(rows[10] * seconds[10], 3, rtol=0.02)
    assert all(0.02 < each < took for each in seconds.values())
    if SIZE > 1:
        exposed = [value for _, value in found["job/exposed_communication_seconds"]]
        assert max(exposed) > 0.6 * LATE, exposed  # rank 0 waits for the last rank
        assert all(0 < value < seconds[step] for step, value in found["job/input_wait_seconds"])
