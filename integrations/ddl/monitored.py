"""Supports sessions of tf.compat.v1.train in which only rank 0 is the chief, or has a checkpoint.

A rank that restores or waits for a chief does not initialise, so the others would wait for it in the broadcast after
their initializers. So all ranks initialise, then rank 0 restores, and all get the variables of rank 0: weights, the
global step, the optimizer's slots, statistics.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.compat import replacing
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import job
from keras_ddl.errors import ConfigError

# Key in a graph's collections, where a Scaffold keeps its own operations as well.
_KEY = "ddl/as_rank_0"
_MOVABLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.bool)
# Graph -> name of the operation that initialises it.
_init_ops: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def install() -> None:
    """Changes tf.compat.v1.train.Scaffold, Supervisor and SessionManager. Once per process."""
    train = tf.compat.v1.train
    prepare = train.SessionManager.prepare_session
    table = [
        (train.Scaffold, "finalize", _finalize),
        (train.Supervisor, "__init__", _finalize),
        (train.SessionManager, "prepare_session", _prepare_session),
        (train.SessionManager, "wait_for_session", functools.partial(_wait_for_session, prepare)),
    ]
    replacing.replace(table)


def _finalize(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    """Finalizes a graph, to which it first adds the broadcast of all variables."""
    graph = kwargs.get("graph") or tf.compat.v1.get_default_graph()
    with graph.as_default():
        if job.is_training_together() and not graph.finalized and not graph.get_collection(_KEY):
            movable = [each for each in tf.compat.v1.global_variables() if each.dtype.base_dtype in _MOVABLE]
            graph.add_to_collection(_KEY, ops.broadcast_variables(movable))
    result = original(owner, *args, **kwargs)
    if owner.init_op is not None:
        _init_ops[graph] = owner.init_op.name
    return result


def _prepare_session(
    prepare: Callable[..., Any],
    manager: Any,
    master: str,
    init_op: Any = None,
    saver: Any = None,
    checkpoint_dir: str | None = None,
    checkpoint_filename_with_path: str | None = None,
    **kwargs: Any,
) -> Any:
    as_rank_0 = tf.compat.v1.get_collection(_KEY)
    if job.is_training_together() and as_rank_0:
        path = saver and (checkpoint_filename_with_path or _latest(checkpoint_dir))
        found, waits = _agree(bool(path), waits=False)
        if any(waits) or len(set(found)) > 1:
            session = prepare(manager, master, init_op, saver, **kwargs)
            if path and communicator.rank() == 0:
                saver.restore(session, path)
            session.run(as_rank_0[0])
            return session
    return prepare(manager, master, init_op, saver, checkpoint_dir, checkpoint_filename_with_path, **kwargs)


def _wait_for_session(
    prepare: Callable[..., Any],
    wait: Callable[..., Any],
    manager: Any,
    master: str,
    config: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    as_rank_0 = tf.compat.v1.get_collection(_KEY)
    graph = tf.compat.v1.get_default_graph()
    if not job.is_training_together() or not as_rank_0 or graph not in _init_ops:
        return wait(manager, master, config, *args, **kwargs)
    _agree(False, waits=True)
    session = prepare(manager, master, graph.get_operation_by_name(_init_ops[graph]), config=config)
    session.run(as_rank_0[0])
    return session


def _agree(found: bool, *, waits: bool) -> tuple[list[bool], list[bool]]:
    """Returns, by rank, whether it has found a checkpoint, and whether it waits for a chief.

    Raises: ConfigError: rank 0 lacks a checkpoint that some ranks have, or waits for a chief.
    """
    pairs_by_rank = communicator.all_gather_object((found, waits), name="ddl/checkpoint_found")
    found_by, waiting = ([pair[i] for pair in pairs_by_rank] for i in (0, 1))
    if waiting[0]:
        raise ConfigError(
            "Rank 0 must be a chief. Received: is_chief=False on rank(s) "
            f"{[rank for rank, waits in enumerate(waiting) if waits]}. Leave is_chief out, on every rank."
        )
    if any(found_by) and not found_by[0]:
        raise ConfigError(
            "A checkpoint must be found by all ranks, by rank 0 alone, or by none. Received: found by rank(s) "
            f"{[rank for rank, has in enumerate(found_by) if has]}. Give rank 0 the checkpoint_dir as well."
        )
    return found_by, waiting


def _latest(checkpoint_dir: str | None) -> str | None:
    return tf.train.latest_checkpoint(checkpoint_dir) if checkpoint_dir else None
