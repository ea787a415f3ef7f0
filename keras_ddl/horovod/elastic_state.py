"""States of an elastic job: what is saved, committed, put back after a restart and synchronized."""

from __future__ import annotations

import abc
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from keras_ddl import communicator
from keras_ddl.checkpoint import commits
from keras_ddl.communicator import stack_position
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.horovod import old_keras_names
from keras_ddl.launch import host_watch

# States are told apart by the order in which a script makes them, which is the same after a restart.
_states = itertools.count()


class HorovodInternalError(RuntimeError):
    """Raised by a program, on all ranks: `run` goes back to the last commit and calls its function again."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised on all ranks: `run` goes on with the state as it is, after a restart when the launcher has other hosts.

    Args:
        skip_sync: taken and not used; states are always synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of this job have changed.")
        self.skip_sync = skip_sync


class State(abc.ABC):
    """What a job goes on from. A class of one's own has save, restore and sync, and `content` and `put` for restarts.

    Args:
        bcast_object, get_rank: taken and not used.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None) -> None:
        self._commits = commits.of_job(f"state-{next(_states)}")
        self._number = 0  # of the last commit, on all ranks alike
        self._hosts_updated = self._is_to_leave = False
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions to call after a restart or an interruption, when the state is back and not yet synchronized.

        The number of ranks may be another one: this is the place to set the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the reset callbacks, for which optimizers have `lr` and keras.backend `set_value`."""
        self._hosts_updated = False
        self.reset()
        with old_keras_names.there():
            for callback in self._reset_callbacks:
                callback()

    def on_hosts_updated(self, timestamp: Any = None, update_res: Any = None) -> None:
        """Makes the next `check_host_updates` interrupt all ranks."""
        self._hosts_updated = True

    def commit(self) -> None:
        """Saves the state, on the disks of the job's hosts too, and checks for other hosts. COLLECTIVE.

        Raises: HostsUpdatedInterrupt. CheckpointError: a commit cannot be written.
        """
        self.save()
        self.write_commit()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises: HostsUpdatedInterrupt: on all ranks, when one was told that the hosts have changed. COLLECTIVE."""
        told = self._hosts_updated, host_watch.hosts_changed()
        gathered = communicator.all_gather_object(told, name="keras_ddl/elastic/hosts")
        self._is_to_leave = any(by_launcher for _, by_launcher in gathered)
        if any(map(any, gathered)):
            raise HostsUpdatedInterrupt()

    def leave_for_other_hosts(self) -> None:
        """Ends this process, if its launcher has said so; the state as it is has been committed on all ranks then."""
        if self._is_to_leave:
            self.save()
            self.write_commit()
            communicator.barrier(name="keras_ddl/elastic/leave")
            host_watch.exit_for_restart()

    def write_commit(self) -> None:
        """Writes what `save` has saved to the disk of this host, if the job can be started again."""
        self._number += 1
        if self._commits is None or communicator.local_rank() != 0:
            return
        content = self.content()
        if content is not None:
            self._commits.write(self._number, content)
        elif self._number == 1:
            stack_position.warn(
                f"What a restart is to begin with has to be known. Received: {type(self).__name__}, whose content() "
                "returns None, so that a restart starts over. Use ObjectState, or return what was saved."
            )

    def take_up_commit(self) -> bool:
        """Puts the newest commit of the job into the states of all ranks; returns whether there is one. COLLECTIVE."""
        if self._commits is not None and communicator.local_rank() == 0:
            self._commits.sweep()
        found = None if self._commits is None else commits.newest(self._commits)
        if found is None:
            return False
        self._number, root, content = found
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
        """Returns what was saved, to be pickled; None: nothing can be kept for a restart."""
        return None

    def put(self, content: Any) -> None:
        """Sets the state to what `content` has returned in another process, perhaps of another rank."""
        raise _incomplete(self, "put")

    @abc.abstractmethod
    def save(self) -> None:
        """Keeps the state in memory."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Goes back to what was saved."""

    def sync(self) -> None:
        """Gives all ranks the state of rank 0. COLLECTIVE."""
        self.sync_from(0)

    def sync_from(self, root: int) -> None:
        """Gives all ranks the state of `root`. COLLECTIVE."""
        raise _incomplete(self, "sync_from")

    def reset(self) -> None:  # noqa: B027  (a class of one's own need not have it)
        """Called before the reset callbacks."""


def _incomplete(state: State, method: str) -> ConfigError:
    return ConfigError(
        "A class of your own defines with content() and put(content) what a restart keeps, and with sync_from(root) "
        f"how ranks share it. Received: {type(state).__name__} without {method}(). Define it, or use ObjectState."
    )


class ObjectState(State):
    """A state of picklable objects: every keyword argument is an attribute. They are saved as they are then.

    Args:
        bcast_object, get_rank: taken and not used.
        kwargs: names and values.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__()
        self.save()

    def save(self) -> None:
        # Pickled: a list that is changed later is not changed in what was saved.
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
