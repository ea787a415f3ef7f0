"""States of an elastic job, which can be saved, committed, restored after a restart, and synchronized."""

from __future__ import annotations

import abc
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.horovod import commits, old_keras_names
from keras_ddl.link import program

# A state is identified by the order in which the script creates states, which is the same after a restart.
_states = itertools.count()


class HorovodInternalError(RuntimeError):
    """Raised by a program on all ranks: `run` restores the last commit and calls its function again."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised on all ranks: `run` continues with the current state, after a restart if the hosts have changed.

    Args:
        skip_sync: ignored; states are always synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of this job have changed.")
        self.skip_sync = skip_sync


class State(abc.ABC):
    """The state from which a job continues.

    A subclass defines save, restore and sync. If a restarted job is to continue, it also defines content and put.

    Args:
        bcast_object, get_rank: ignored.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._commits = commits.of_job(f"state-{next(_states)}")
        self._number = 0  # number of the last commit, equal on all ranks
        self._hosts_updated = self._is_to_leave = False
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions to call after a restart or an interruption, when the state is restored but not synchronized.

        The number of ranks may have changed, so these functions can set the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the reset callbacks, which may use Keras 2's `lr` and keras.backend.set_value."""
        self._hosts_updated = False
        self.reset()
        with old_keras_names.available():
            for callback in self._reset_callbacks:
                callback()

    def on_hosts_updated(self, timestamp: Any = None, update_res: Any = None) -> None:
        """Makes the next `check_host_updates` interrupt all ranks."""
        self._hosts_updated = True

    def commit(self) -> None:
        """Saves the state in memory and on the disk of each host, and checks whether the hosts have changed.

        COLLECTIVE.
        Raises: HostsUpdatedInterrupt. CheckpointError: a commit cannot be written.
        """
        self.save()
        self.write_commit()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises: HostsUpdatedInterrupt: on all ranks, if one was notified that the hosts have changed. COLLECTIVE."""
        notices = self._hosts_updated, program.hosts_changed()
        gathered = communicator.all_gather_object(notices, name="keras_ddl/elastic/hosts")
        self._is_to_leave = any(by_launcher for _, by_launcher in gathered)
        if any(map(any, gathered)):
            raise HostsUpdatedInterrupt()

    def leave_for_other_hosts(self) -> None:
        """Commits the current state on all ranks and ends this process, if the launcher has notified a rank."""
        if self._is_to_leave:
            self.save()
            self.write_commit()
            communicator.barrier(name="keras_ddl/elastic/leave")
            program.exit_for_restart()

    def write_commit(self) -> None:
        """Writes the saved state to the disk of this host, if the job can be restarted."""
        self._number += 1
        if self._commits is None or communicator.local_rank() != 0:
            return
        content = self.content()
        if content is not None:
            self._commits.write(self._number, content)
        elif self._number == 1:
            stack_position.warn(
                f"A restart needs the state's content. Received: {type(self).__name__}, whose content() returns None, "
                "so a restart begins from the start. Use ObjectState, or return the saved state."
            )

    def restore_commit(self) -> bool:
        """Restores the job's newest commit on all ranks; returns whether there is one. COLLECTIVE."""
        if self._commits is not None and communicator.local_rank() == 0:
            self._commits.sweep()
        commit = None if self._commits is None else commits.newest(self._commits)
        if commit is None:
            return False
        self._number, root, content = commit
        problem = ""
        if communicator.rank() == root:
            try:
                self.put(content)
            except CheckpointError as error:
                problem = str(error)
        problem = communicator.broadcast_object(problem, root, name="keras_ddl/elastic/problem")
        if problem:
            raise CheckpointError(problem)
        self.sync_from(root)
        return True

    def content(self) -> Any:
        """Returns the saved state, which must be picklable; None: restarts are not supported."""
        return None

    def put(self, content: Any) -> None:
        """Sets the state to what `content` has returned in another process, which may be that of another rank."""
        raise _incomplete(self, "put")

    @abc.abstractmethod
    def save(self) -> None:
        """Saves the state in memory."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Restores the saved state."""

    def sync(self) -> None:
        """Broadcasts the state of rank 0. COLLECTIVE."""
        self.sync_from(0)

    def sync_from(self, root: int) -> None:
        """Broadcasts the state of `root`. COLLECTIVE."""
        raise _incomplete(self, "sync_from")

    def reset(self) -> None:  # noqa: B027  (subclasses need not define it)
        """Called before the reset callbacks."""


def _incomplete(state: State, method: str) -> ConfigError:
    return ConfigError(
        "A custom State must define content() and put(content) for restarts, and sync_from(root) to share it between "
        f"ranks. Received: {type(state).__name__} without {method}(). Define it, or use ObjectState."
    )


class ObjectState(State):
    """A state of picklable objects: every keyword argument becomes an attribute. The constructor saves it.

    Args:
        bcast_object, get_rank: ignored.
        kwargs: names and values.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__()
        self.save()

    def save(self) -> None:
        # Pickled, so that later changes to a list do not change the saved state.
        self._saved = pickle.dumps({name: getattr(self, name) for name in self._names})

    def restore(self) -> None:
        for name, value in pickle.loads(self._saved).items():
            setattr(self, name, value)

    def sync_from(self, root: int) -> None:
        ObjectState.save(self)
        self._saved = communicator.broadcast_object(self._saved, root, name="keras_ddl/elastic/objects")
        ObjectState.restore(self)

    def content(self) -> Any:
        return {"objects": self._saved}

    def put(self, content: Any) -> None:
        for name, value in pickle.loads(content["objects"]).items():
            setattr(self, name, value)
        ObjectState.save(self)
