"""Horovod's hook for sessions of tf.compat.v1.train."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.horovod.collectives import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks rank `root_rank`'s variables when an initialized or restored session begins. COLLECTIVE.

    Args:
        root_rank: the rank whose global variables all ranks get.
        device: ignored.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op[0].graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast for each session that is created."""
        session.run(self.bcast_op)
