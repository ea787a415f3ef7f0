"""Rank 0's progress bar has the rows and metrics of all ranks; the others show none. Run by test_strategy.py."""

import contextlib
import functools
import io
import re
import time
from unittest import mock

from keras.src.callbacks import progbar_logger

from harness.rank_program import long
from keras_ddl.strategy.keras_patches import progress
from strategy.common import LAST, RANK, SIZE, X, Y, keras, linear_model

ROWS, BATCH = len(X), 10  # the last batch has fewer
STEPS = -(-ROWS // BATCH)


class Sleep(keras.callbacks.Callback):
    """Makes steps so long that rates can be told, and those of the last rank longer."""

    never_stops_within_epoch = True

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.07 if RANK == LAST else 0.02)


def shown(model, verbose):
    out = io.StringIO()
    every_step = mock.patch.object(progbar_logger, "Progbar", functools.partial(keras.utils.Progbar, interval=0))
    with contextlib.redirect_stdout(out), every_step:  # a bar leaves out the states of steps of less than 50 ms
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=verbose, callbacks=[Sleep()])
    return out.getvalue()


def values(text, key):  # every state of the bar
    return re.findall(rf" {key}: ([\d.e,-]+)", text)


@long
def check_bar_is_rank_0s_with_the_rows_of_all_and_metrics_of_all_ranks():
    model = linear_model(metrics=["mae"])
    one_process = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    one_process.compile("sgd", "mse", metrics=["mae"])
    one_process.set_weights(model.get_weights())
    progress._said.clear()
    for verbose in ("auto", 1, 2):
        began = time.monotonic()
        text = shown(model, verbose)
        took = time.monotonic() - began
        if RANK != 0:
            assert text == "", text
            continue
        expected = shown(one_process, verbose)
        said = f"keras_ddl: {SIZE} ranks on 1 host train together, each on its part of every batch.\n"
        assert text.startswith(said) if verbose == "auto" else "keras_ddl" not in text, text
        states = STEPS + 1 if verbose != 2 else 1
        assert len(values(text, "rows/s")) == states, text
        # Of all ranks, without the first step; rank 0 itself sleeps in each.
        speed = float(values(text, "rows/s")[-1].replace(",", ""))
        assert (ROWS - BATCH) / took < speed < (ROWS - BATCH) / ((STEPS - 1) * 0.02), (speed, took)
        for key in ("loss", "mae"):
            assert len(values(text, key)) == states and values(text, key) == values(expected, key), (text, expected)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):  # a bar that the program passes itself
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[keras.callbacks.ProgbarLogger()])
    assert RANK == 0 or out.getvalue() == ""
