"""Runs the collectives of one group in the engine, and returns PyTorch's works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras_ddl import config
from keras_ddl.communicator import Communicator
from keras_ddl.communicator.native import requests
from keras_ddl.errors import ConfigError
from keras_ddl.torch.work import Completions, DdlWork, Together


class Engine:
    """Runs the collectives of one group on its communicator.

    All collectives of a group have the same name: they are matched by order, and if ranks call different ones, the
    error names each rank's call.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._name = f"{comm.prefix}collective"
        self._completions = Completions()
        self._lock = threading.Lock()
        self._ordinal: int | None = None  # number of this rank's GPU, once a tensor was on one

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
        """Runs a collective, on this thread if the caller waits for it.

        Args:
            results: tensors for the caller; they and `keep` stay alive while it runs.
            agree: a string that must be equal on all ranks.
            waits: whether to return only when it is done.
            finish: called when it ends, to copy results to their tensors.
            fields: the request's fields; see requests.Requests.request.

        Raises: KerasDdlError: the collective fails before this returns.
        """
        native = self.comm.native()
        if places and places[0].device is not None:
            fields["stream"] = self._stream(places[0].device)
        request = native.request(kind, self._name, dtype, places, detail=agree, **fields)
        if waits:
            native.run(request, (keep, results))
            if finish is not None:
                finish(None)
            return DdlWork(results)
        return DdlWork(results, native.start(request, (keep, results)), finish, self._completions)

    def _stream(self, ordinal: int) -> int:
        """Returns the current stream of a GPU. The first use chooses the group's GPU and is COLLECTIVE."""
        with self._lock:
            if self._ordinal is None:
                self.comm.native().add_device(ordinal, config.get("DEVICE"), self._name)
                self._ordinal = ordinal
        if ordinal != self._ordinal:
            raise ConfigError(
                f"A group of backend 'ddl' uses one GPU per rank. Received: tensors on cuda:{ordinal}, after some on "
                f"cuda:{self._ordinal}, on rank {self.rank}. Call torch.cuda.set_device() before "
                "the first collective."
            )
        stream: int = torch.cuda.current_stream(ordinal).cuda_stream
        return stream

    def together(self, works: Sequence[DdlWork], results: Sequence[torch.Tensor]) -> DdlWork:
        """Combines several works into one."""
        if len(works) == 1:
            return works[0]
        return DdlWork(results, Together(works), completions=self._completions)

    def close(self) -> None:
        """Leaves the group. Running collectives fail; their futures still complete."""
        self._completions.close()
        self.comm.close()
