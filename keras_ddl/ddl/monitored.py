"""MonitoredTrainingSession where rank 0 alone has the checkpoint: given the directory, or with it on its own disk.

A rank that restores does not initialise, and the others would wait for it in the broadcast behind their initializers.
So all ranks initialise, then rank 0 restores, and all get everything that rank 0 has: weights, the global step, the
optimizer's slots, statistics.
"""

from __future__ import annotations

import functools
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import job, start
from keras_ddl.errors import ConfigError

# In a graph's collections, where a Scaffold's own operations are, too.
_KEY = "ddl/as_rank_0"
_MOVABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.bool)


def install() -> None:
    """Changes tf.compat.v1.train.Scaffold and SessionManager. Once per process."""
    scaffold, manager = tf.compat.v1.train.Scaffold, tf.compat.v1.train.SessionManager
    finalize, prepare = scaffold.finalize, manager.prepare_session

    @functools.wraps(finalize)
    def _finalize(self: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if job.is_training_together() and not graph.finalized and not graph.get_collection(_KEY):
            # While a graph can still be added to.
            movable = [each for each in tf.compat.v1.global_variables() if each.dtype.base_dtype in _MOVABLE]
            graph.add_to_collection(_KEY, start.broadcast_op(movable, _KEY))
        return finalize(self)

    @functools.wraps(prepare)
    def prepare_session(
        self: Any,
        master: str,
        init_op: Any = None,
        saver: Any = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        **kwargs: Any,
    ) -> Any:
        as_rank_0 = tf.compat.v1.get_collection(_KEY)
        if not job.is_training_together() or not as_rank_0:
            return prepare(self, master, init_op, saver, checkpoint_dir, checkpoint_filename_with_path, **kwargs)
        path = saver and (checkpoint_filename_with_path or _latest(checkpoint_dir))
        found = communicator.all_gather_object(bool(path), name="ddl/checkpoint_found")
        if found[0] == all(found) and any(found) == found[0]:
            return prepare(self, master, init_op, saver, checkpoint_dir, checkpoint_filename_with_path, **kwargs)
        if not found[0]:
            raise ConfigError(
                "A checkpoint must be found by all ranks, by rank 0 alone, or by none. Received: found by rank(s) "
                f"{[rank for rank, has in enumerate(found) if has]}. Give rank 0 the checkpoint_dir, too."
            )
        session = prepare(self, master, init_op, saver, **kwargs)
        if communicator.rank() == 0:
            saver.restore(session, path)
        session.run(as_rank_0[0])
        return session

    scaffold.finalize, manager.prepare_session = _finalize, prepare_session


def _latest(checkpoint_dir: str | None) -> str | None:
    return tf.train.latest_checkpoint(checkpoint_dir) if checkpoint_dir else None
