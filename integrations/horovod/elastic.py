"""horovod.tensorflow.elastic: states that can be committed, and `run`, which continues from the last commit.

If the launcher can continue with fewer ranks (`-np MIN:MAX`, on one host), the remaining processes call the function
again, as Horovod's do. Otherwise all processes of a job are restarted (`keras-ddl run --restarts`), so commits are
written to the disk of each host (commits.py), and `run` restores the job's newest commit.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import communicator, config
from keras_ddl.checkpoint.matching import match, table
from keras_ddl.checkpoint.snapshot import tensor_of
from keras_ddl.communicator.transports import membership
from keras_ddl.compat.tensorflow import as_array, tf
from keras_ddl.errors import ConfigError, RankLostError
from keras_ddl.horovod.elastic_state import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State
from keras_ddl.model_state import WEIGHTS, keyed
from keras_ddl.ops.errors import from_tensorflow
from keras_ddl.state.replicate import replicate
from keras_ddl.strategy.agreement.compared import tf_variable
from keras_ddl.strategy.agreement.training_state import broadcast_with_streams

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)` so that it begins with the state of the job's newest commit, equal on all ranks.

    In the first attempt, this is rank 0's state. After a restart by `keras-ddl run --restarts`, the newest commit is
    restored, then the reset callbacks are called. Before that, the script must not call collectives that only some
    ranks reach. If a rank is lost and the launcher can continue without it, the others return to their last commit, and
    the function is called again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if state.restore_commit() or config.get("RESTART"):
            state.on_reset()
        while True:
            state.sync()
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
            except HostsUpdatedInterrupt:
                state.leave_for_other_hosts()
            except (RankLostError, tf.errors.OpError) as error:
                lost = from_tensorflow(error) if isinstance(error, tf.errors.OpError) else error
                if not isinstance(lost, RankLostError) or not membership.can_ask():
                    raise
                communicator.regroup()
                state.restore()
            state.on_reset()

    return wrapper


class _VariablesState(ObjectState):
    """An ObjectState with variables."""

    @abc.abstractmethod
    def variables_of_state(self) -> list[Any]:
        """Returns the variables, each once, in the same order on all ranks and after a restart."""

    def broadcast_variables(self, root: int) -> None:
        """Broadcasts the variables of `root`. COLLECTIVE."""
        replicate(list(map(tf_variable, self.variables_of_state())), root)

    def save(self) -> None:
        # References, not copies: an update gives a variable a new tensor.
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
        variables = self._keyed()
        values = dict(zip(variables, map(as_array, self._values)))
        return {**super().content(), "variables": values, "table": table(variables)}

    def put(self, content: Any) -> None:
        variables = self._keyed()
        stored = match(table(variables), content["table"], "variable", "a commit")
        for key, variable in variables.items():
            variable.assign(content["variables"][stored[key]])
        super().put(content)

    def _keyed(self) -> dict[str, Any]:
        """Returns the variables by keys as in a checkpoint."""
        return keyed(WEIGHTS, self.variables_of_state())


class TensorFlowKerasState(_VariablesState):
    """The variables of a Keras model and its optimizer, with objects as attributes (batch=0, epoch=0).

    Args:
        model: a built model.
        optimizer: default: the model's optimizer, which is built if needed.
        backend: ignored.
        kwargs: as in ObjectState.
    Raises: ConfigError: the model is not built, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ConfigError(
                f"The model of an elastic state must be built. Received: {model.name!r}, which has no variables yet. "
                "Call model.build(input_shape), or call the model on a batch."
            )
        self.model, self.backend = model, backend
        self.optimizer: Any = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ConfigError(
                f"An elastic state needs an optimizer. Received: none, and {model.name!r} is not compiled. Compile it, "
                "or pass optimizer=."
            )
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)

    def variables_of_state(self) -> list[Any]:
        """Returns the model's variables, then the optimizer's."""
        return list({id(each): each for each in [*self.model.variables, *self.optimizer.variables]}.values())

    def broadcast_variables(self, root: int) -> None:
        """Broadcasts the variables, and gives each rank's random layers their own stream."""
        broadcast_with_streams(self.variables_of_state(), root)


class TensorFlowState(_VariablesState):
    """A list of variables, with objects as attributes.

    Args:
        variables: variables of TensorFlow or Keras.
        session: must be None.
        kwargs: as in ObjectState.
    Raises: ConfigError: there are no variables, or a session is given.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None or not variables:
            what = "a session of TensorFlow 1" if session is not None else "no variables"
            raise ConfigError(
                f"TensorFlowState needs a list of variables, because TensorFlow 2 keeps none. Received: {what}. Pass "
                "variables=[...], such as model.variables."
            )
        self.variables = list(variables)
        super().__init__(**kwargs)

    def variables_of_state(self) -> list[Any]:
        return self.variables
