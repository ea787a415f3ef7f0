"""Whether ranks write and read their own parts of checkpoints, and how each reads its own when a run is resumed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl import communicator, model_state
from keras_ddl.communicator import stack_position
from keras_ddl.communicator.first_rank import is_first_rank, on_first_rank
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import CheckpointError, of_other_rank
from keras_ddl.files import durable
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards import gathered_slots, stored_parts


def are_used(model: Any, dir: Path) -> bool:
    """Whether each rank writes and reads its own parts of the checkpoints in `dir`. COLLECTIVE if ranks have parts.

    They do if they can reach the directory. Otherwise rank 0 gathers and scatters the parts, with a warning.
    """
    job = job_with_parts(model)
    if job is None:
        return False
    needed = job.size if job.mesh is None or job.shards_from_elements is not None else job.mesh.model.size
    apart = [rank for rank, is_there in enumerate(_reached(dir)[:needed]) if not is_there]
    if apart and is_first_rank():
        stack_position.warn(
            "Each rank must reach the checkpoint directory to write its part of the variables that are spread over "
            f"ranks. Received: {dir}, where rank(s) {', '.join(map(str, apart))} of {needed} do not see the files of "
            "rank 0. Rank 0 gathers the whole variables instead, which takes more memory. Give a directory on a "
            "file system that all ranks share."
        )
    return not apart


def restore(model: Any, dir: Path, step: int) -> None:
    """Gives every rank its parts of the checkpoint of `step`, in which rank 0 has restored the rest. COLLECTIVE.

    Raises: CheckpointError, on every rank: a rank could not read its parts.
    Cost: each rank of the first model axis reads its slices and sends them along the batch axis.
    """
    job = job_with_parts(model)
    assert job is not None
    problem = None
    if job.mesh is None or job.shards_from_elements is not None or job.rank < job.mesh.model.size:
        try:
            model_state.restore_parts(model, ckpt.find(dir, step))
        except (CheckpointError, OSError, tf.errors.OpError) as error:  # the others wait
            problem = str(error)
    problems = communicator.all_gather_object(problem, name="Checkpoint/restored_parts")
    failed = next((rank for rank, each in enumerate(problems) if each is not None), None)
    if failed is not None:
        raised = CheckpointError(f"rank {failed}: {problems[failed]}")
        raise raised if failed == job.rank else of_other_rank(raised, failed)
    if job.mesh is not None:
        slots = [each for each in gathered_slots.slots_of(model) if model_state.slot_in_parts(each) is not None]
        stored_parts.send_along_batch(slots, job.mesh.data)


def job_with_parts(model: Any) -> Job | None:
    """Returns the job of a model if its ranks may have parts of variables, else None."""
    strategy = keras_compat.strategy_of(model)
    job: Job | None = strategy.job if strategy is not None else None
    if job is None or job.size == 1 or (job.mesh is None and job.shards_from_elements is None):
        return None
    return job


def _reached(dir: Path) -> list[bool]:
    """Returns which ranks can write into a directory that rank 0 makes in `dir`. COLLECTIVE."""

    def make() -> str:
        try:
            return durable.make_staging(dir).name
        except OSError as error:
            raise CheckpointError(durable.explain(error, "A checkpoint", dir)) from error

    folder = dir / on_first_rank(make, "Checkpoint/reach")
    reached = communicator.all_gather_object(os.access(folder, os.W_OK | os.X_OK), name="Checkpoint/reached")
    if is_first_rank():
        with contextlib.suppress(OSError):
            folder.rmdir()
    return reached
