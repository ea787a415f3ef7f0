"""Records whether this thread runs a step as one process would, and for which job it traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_ddl.compat.context import Setting
from keras_ddl.compat.strategies import outside_strategies
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.strategy.job import Job

# Whether this thread is tracing, or running, a step on the batch of all ranks, as one process would.
_sees_global_batch = Setting("sees_global_batch", False)
sees_global_batch = _sees_global_batch.get
# The job whose step this thread traces, to be cut for its ranks.
tracing_for: Setting[Job | None] = Setting("job_of_step", None)


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Makes the program's code behave as in one process within the block: it sees the batch of all ranks."""
    with _sees_global_batch(True), outside_strategies():
        yield


def as_one_graph(
    step: Callable[..., Any], following: Sequence[tuple[Callable[..., Any], Sequence[tf.TensorSpec]]]
) -> Callable[..., Any]:
    """Returns `step` for separate tracing, with the program's Python run as often as in one graph of several steps.

    TensorFlow traces a step that makes variables a second time. In one process the second pass comes after the
    following steps of the graph, so these run first here, too.

    Args:
        following: the steps that follow in the graph, with the types of their arguments.
    """

    @do_not_convert
    def alone(*tensors: Any) -> Any:
        made = list[Any]()

        def note(make: Callable[..., Any], **kwargs: Any) -> Any:
            made.append(make(**kwargs))
            return made[-1]

        with tf.variable_creator_scope(note):
            outputs = step(*tensors)
        if made:
            for each, specs in following:
                each(*(tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs))
        return outputs

    return alone
