"""horovod.tensorflow.elastic: a state that is committed, and a function that goes on from the last commit.

Horovod keeps the processes that are left and starts the function again in them. keras_ddl ends all processes of a job
and starts it again (`keras-ddl run --restarts`), so a commit is kept on the disk of each host
(checkpoint/commits.py), and `run` takes up the newest of the job.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator, config, ops
from keras_ddl.callbacks._training_state import broadcast_with_streams
from keras_ddl.checkpoint import commits
from keras_ddl.checkpoint.model_state import tensor_of
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.launch import host_watch

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]

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


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `func(state, ...)` begin with the state of the newest commit of the job, the same on all ranks.

    In the first attempt that is the state as rank 0 has made it. After a restart by `keras-ddl run --restarts` the
    newest commit is put back first, then the reset callbacks are called. No collective may run between a restart and
    this that is not reached by all ranks.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if state.take_up_commit() or config.get("RESTART"):
            state.on_reset()
        while True:
            state.sync()
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
            except HostsUpdatedInterrupt:
                state.leave_for_other_hosts()
            state.on_reset()

    return wrapper


class State:
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
        """Calls `reset` and the reset callbacks."""
        self._hosts_updated = False
        self.reset()
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
        told = self._hosts_updated, host_watch.told()
        everyone = communicator.all_gather_object(told, name="keras_ddl/elastic/hosts")
        self._is_to_leave = any(by_launcher for _, by_launcher in everyone)
        if any(map(any, everyone)):
            raise HostsUpdatedInterrupt()

    def leave_for_other_hosts(self) -> None:
        """Ends this process, if its launcher has said so; the state as it is has been committed on all ranks then."""
        if self._is_to_leave:
            self.save()
            self.write_commit()
            communicator.barrier(name="keras_ddl/elastic/leave")
            host_watch.leave()

    def write_commit(self) -> None:
        """Writes what `save` has saved to the disk of this host, if the job can be started again."""
        self._number += 1
        if self._commits is None or communicator.local_rank() != 0:
            return
        content = self.content()
        if content is not None:
            self._commits.write(self._number, content)
        elif self._number == 1:
            warnings.warn(
                f"What a restart is to begin with has to be known. Received: {type(self).__name__}, whose content() "
                "returns None, so that a restart begins anew. Use ObjectState, or return what was saved.",
                stacklevel=3,
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
        raise NotImplementedError

    def save(self) -> None:
        """Keeps the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the state of rank 0. COLLECTIVE."""
        self.sync_from(0)

    def sync_from(self, root: int) -> None:
        """Gives all ranks the state of `root`. COLLECTIVE."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called before the reset callbacks."""


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


class _VariablesState(ObjectState):
    """An ObjectState with variables."""

    def variables_of_state(self) -> list[Any]:
        """Returns the variables, each once, in the same order on all ranks and after a restart."""
        raise NotImplementedError

    def broadcast_variables(self, root: int) -> None:
        """Gives all ranks the variables of `root`. COLLECTIVE."""
        ops.broadcast_variables(self.variables_of_state(), root=root)

    def save(self) -> None:
        # Noted, not copied: an update gives a variable another tensor.
        self._values = [tensor_of(variable) for variable in self.variables_of_state()]
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables_of_state(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync_from(self, root: int) -> None:
        if communicator.size() > 1:
            self.broadcast_variables(root)
        super().sync_from(root)
        self.save()

    def content(self) -> Any:
        return {**super().content(), "variables": [np.asarray(value) for value in self._values]}

    def put(self, content: Any) -> None:
        values, variables = content["variables"], self.variables_of_state()
        here = [(tuple(each.shape), getattr(each.dtype, "name", each.dtype)) for each in variables]
        there = [(value.shape, value.dtype.name) for value in values]
        if here != there:
            pairs = itertools.zip_longest(here, there)
            place, (mine, theirs) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            raise CheckpointError(
                f"A commit goes back into the state that it is of. Received: {len(there)} variables in the commit, "
                f"{len(here)} here; number {place} is {theirs} there and {mine} here. Build the model as it was, or "
                "empty KERAS_DDL_COMMIT_DIR."
            )
        for variable, value in zip(variables, values):
            variable.assign(value)
        super().put(content)


class TensorFlowKerasState(_VariablesState):
    """The variables of a Keras model and its optimizer, with objects as attributes (batch=0, epoch=0).

    Args:
        model: built.
        optimizer: default: that of the model; it is built if need be.
        backend: taken and not used.
        kwargs: as for ObjectState.
    Raises: ConfigError: the model is not built, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ConfigError(
                f"The model of an elastic state must be built. Received: {model.name!r}, which has no variables yet. "
                "Run model.build(input_shape), or the model on a batch."
            )
        self.model, self.optimizer, self.backend = model, optimizer or getattr(model, "optimizer", None), backend
        if self.optimizer is None:
            raise ConfigError(
                f"An elastic state holds an optimizer. Received: none, and {model.name!r} is not compiled. Compile it, "
                "or pass optimizer=."
            )
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def variables_of_state(self) -> list[Any]:
        """The model's, then the optimizer's."""
        return list({id(each): each for each in [*self.model.variables, *self.optimizer.variables]}.values())

    def broadcast_variables(self, root: int) -> None:
        """Random layers then draw from a stream of each rank's own."""
        broadcast_with_streams(self.variables_of_state(), root)


class TensorFlowState(_VariablesState):
    """A list of variables, with objects as attributes.

    Args:
        variables: of TensorFlow or Keras.
        session: must be None.
        kwargs: as for ObjectState.
    Raises: ConfigError: no variables, or a session.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None or not variables:
            what = "a session of TensorFlow 1" if session is not None else "no variables"
            raise ConfigError(
                f"TensorFlowState takes a list of variables; TensorFlow 2 keeps none. Received: {what}. Pass "
                "variables=[...], such as model.variables."
            )
        self.variables = list(variables)
        super().__init__(**kwargs)

    def variables_of_state(self) -> list[Any]:
        """Those that were given."""
        return self.variables
