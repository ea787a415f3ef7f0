"""Only rank 0 shows a progress bar, and it covers the rows and metrics of all ranks. Run by test_strategy.py."""

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
    """Makes steps slow enough to measure rates, and slowest on the last rank."""

    never_stops_within_epoch = True

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.07 if RANK == LAST else 0.02)


def shown(model, verbose):
    out = io.StringIO()
    every_step = mock.patch.object(progbar_logger, "Progbar", functools.partial(keras.utils.Progbar, interval=0))
    with contextlib.redirect_stdout(out), every_step:  # by default a bar skips updates less than 50 ms apart
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=verbose, callbacks=[Sleep()])
    return out.getvalue()


def values(text, key):  # one per update of the bar
    return re.findall(rf" {key}: ([\d.e,-]+)", text)


@long
def check_only_rank_0_shows_a_bar_and_it_covers_all_ranks():
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
        # The rate counts the rows of all ranks from the second step on; rank 0 itself sleeps in each step.
        speed = float(values(text, "rows/s")[-1].replace(",", ""))
        assert (ROWS - BATCH) / took < speed < (ROWS - BATCH) / ((STEPS - 1) * 0.02), (speed, took)
        for key in ("loss", "mae"):
            assert len(values(text, key)) == states and values(text, key) == values(expected, key), (text, expected)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):  # a bar that the program passes in
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[keras.callbacks.ProgbarLogger()])
    assert RANK == 0 or out.getvalue() == ""
