"""Runs the collectives of one group in the engine, and gives back what PyTorch waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_ddl.communicator import Communicator, requests
from keras_ddl.torch.work import Completions, DdlWork, Together


class Engine:
    """One group's end of its communicator.

    All collectives of a group have one name: they are matched in the order in which ranks call them, and a rank that
    calls another collective than the others is told what each rank has called.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._name = f"{comm.prefix}collective"
        self._completions = Completions()

    def run(
        self,
        kind: int,
        dtype: str,
        places: Sequence[requests.Memory],
        results: Sequence[torch.Tensor],
        *,
        agree: str,
        waits: bool = False,
        keep: Any = None,
        finish: Callable[[Any], None] | None = None,
        **fields: Any,
    ) -> DdlWork:
        """Runs a collective, on this thread where the caller waits anyway.

        Args:
            results: what the caller gets; they and `keep` stay alive while it goes on.
            agree: what must be equal on all ranks.
            waits: whether to return only when it is done.
            finish: brings what came to its place.
            fields: of the request; see requests.Requests.request.

        Raises: KerasDdlError, if it fails before this returns.
        """
        native = self.comm.native()
        request = native.request(kind, self._name, dtype, places, detail=agree, **fields)
        if waits:
            native.run(request, (keep, results))
            if finish is not None:
                finish(None)
            return DdlWork(results)
        return DdlWork(results, native.start(request, (keep, results)), finish, self._completions)

    def together(self, works: Sequence[DdlWork], results: Sequence[torch.Tensor]) -> DdlWork:
        """Returns one work for several."""
        if len(works) == 1:
            return works[0]
        return DdlWork(results, Together(works), completions=self._completions)

    def close(self) -> None:
        """Leaves the group. What is under way fails; futures still complete."""
        self._completions.close()
        self.comm.close()
