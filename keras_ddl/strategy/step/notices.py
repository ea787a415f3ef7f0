"""Shows messages about a newly traced step: its communication, its slow parts, and forbidden operations."""

from __future__ import annotations

from typing import Any

from keras_ddl import cut
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.errors import ConfigError

_LARGE = 1 << 20  # bytes gathered in a step that are worth a warning


def warn_of_restarted_kernels(name: str, concrete: Any) -> None:
    """Warns if a trace is built into a second graph of this rank, for batches in another form.

    Kernels that store the state of their random numbers restart there, but would continue in one process.
    """
    drawing = next((each.name for each in _nodes(concrete) if cut.draws_in_kernels(each)), None)
    if drawing is not None:
        stack_position.warn(
            f"{name}: {drawing} keeps its random state in its kernel. This batch comes in a different form than "
            "earlier ones (say, a PyDataset after arrays), so the step was built again and the random state started "
            "again: the random numbers differ from those of one process. Draw with keras.random and a SeedGenerator, "
            "or pass all data in one form."
        )


def refuse_collectives(name: str, rank: int, concrete: Any) -> None:
    """Raises: ConfigError: the step itself contains collectives."""
    own = next((each.op for each in _nodes(concrete) if each.op.startswith("Ddl")), None)
    if own is not None:
        raise ConfigError(
            f"{name}: this step sees the global batch, as one process does, so it must not contain collectives. "
            f"Received: {own} (rank {rank}). Leave the collectives out, or use them in a loop of strategy.run."
        )


def warn_of_slow_parts(name: str, report: cut.Report) -> None:
    """Warns about operations that every rank computes in full, and about large gathers."""
    for operation, reason in report.kept_of_batch():
        stack_position.warn(
            f"{name}: {operation} is {reason}, and is replicated: every rank computes all of it. That is correct, "
            "but no faster than in one process."
        )
    for each in report.large_gathers(_LARGE):
        open_size = f"at least {each.few_rows_bytes:,} bytes (of {cut.FEW_ROWS} rows)"
        size = open_size if each.bytes is None else f"{each.bytes:,} bytes"
        stack_position.warn(
            f"{name}: {size} are gathered in each step, because {each.reason}"
            + (f" ({each.line})" if each.line else "")
            + ". That is correct, but slower than necessary."
        )


def _nodes(concrete: Any) -> list[Any]:
    """Returns the nodes of a traced step and of the functions that it calls."""
    traced = concrete.graph.as_graph_def()
    return [*traced.node, *(node for function in traced.library.function for node in function.node_def)]
