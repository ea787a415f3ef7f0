"""Whether this thread runs a step as one process would, and for which job it is traced."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from keras_ddl.compat.context import setting
from keras_ddl.compat.strategies import outside_strategies
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.strategy.job import Job

_sees_global_batch: ContextVar[bool] = ContextVar("keras_ddl_sees_global_batch", default=False)
_job_of_step: ContextVar[Job | None] = ContextVar("keras_ddl_job_of_step", default=None)


def sees_global_batch() -> bool:
    """Whether this thread is tracing, or running, a step on the batch of all ranks, as one process would."""
    return _sees_global_batch.get()


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, the program's code means what it means in one process: it sees the batch of all ranks."""
    with setting(_sees_global_batch, True), outside_strategies():
        yield


def job_of_step() -> Job | None:
    """Returns the job whose step this thread traces, or None."""
    return _job_of_step.get()


def tracing_for(job: Job) -> AbstractContextManager[None]:
    """Returns a context in which a step is traced, to be cut for the ranks of `job`."""
    return setting(_job_of_step, job)


def as_one_graph(
    step: Callable[..., Any], following: Sequence[tuple[Callable[..., Any], Sequence[tf.TensorSpec]]]
) -> Callable[..., Any]:
    """Returns `step`, to be traced by itself, so that the program's Python runs as where one graph has several steps.

    A tf.function that makes variables is traced again, whole: in one process the steps that follow run before this one
    runs again.

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


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pauses Python's search for cyclic garbage in all threads, while a step is traced, cut and run for the first time.

    That makes hundreds of thousands of objects that stay. Python takes them for a reason to look at all objects of the
    process again: 0.3 s in one with TensorFlow, and there is nothing to free.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
