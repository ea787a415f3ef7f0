"""What the check programs of the callbacks share."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import keras_ddl
from strategy.common import RANK


@contextlib.contextmanager
def shared_folder():
    """One folder for all ranks, which must not be left before all are done with it."""
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, name="test/folder")
    yield Path(folder)
    keras_ddl.barrier(name="test/folder_done")
    if RANK == 0:
        shutil.rmtree(folder)


def everyone(value):
    return keras_ddl.all_gather_object(value, name="test/everyone")
