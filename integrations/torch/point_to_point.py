"""Messages between two ranks, over a separate transport, because the engine only has collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from keras_ddl.communicator import Communicator
from keras_ddl.errors import (
    CollectiveError,
    ConfigError,
    DeadlineError,
    KerasDdlError,
    NotInitializedError,
    RankMismatchError,
)
from keras_ddl.torch.work import DdlWork

_SPINS = 200
_PAUSE_S = 50e-6


class Message:
    """A message in progress. It makes progress when polled, by a waiting caller or by `PointToPoint`.

    Args:
        length: expected number of bytes; None for sends.
        what: for errors.
    """

    _abandoned: ClassVar[list[Any]] = []  # kept alive because MPI may still use their memory

    def __init__(self, request: Any, length: int | None, what: str, timeout: timedelta) -> None:
        self._request = request
        self._length = length
        self._what = what
        self._seconds = timeout.total_seconds()
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._done = False
        self._error: Exception | None = None
        self.is_over = False  # whether the transport has completed it
        self.source: int | None = None

    def is_done(self) -> bool:
        """Whether the message was received or sent, or has failed, or the group's timeout has passed."""
        with self._lock:
            if self._done:
                return True
            try:
                self._done = self._request.test()
            except KerasDdlError as error:
                self._end(CollectiveError(f"{self._what}: {error}. Sender and receiver must agree on the length."))
            else:
                if self._done:
                    self.is_over = True
                    self._check_length()
                elif time.monotonic() - self._begun > self._seconds:
                    self._abandoned.append(self._request)
                    self._end(DeadlineError(f"{self._what} has not ended within {self._seconds:g} s."))
            return self._done

    def give_up(self) -> None:
        """Ends it with an error, because its group is shut down."""
        if self.is_done():
            return
        with self._lock:
            self.is_over = self._request.cancel()
            self._abandoned.append(self._request)
            self._end(NotInitializedError(f"{self._what} has not ended before its group was shut down."))

    def _check_length(self) -> None:
        self.source = self._request.source
        if self._length is not None and (sent := self._request.length) != self._length:
            self._end(RankMismatchError(f"{self._what}: rank {self.source} has sent {sent} bytes, not {self._length}."))

    def _end(self, error: Exception) -> None:
        self._done, self._error = True, error

    def wait(self, seconds: float | None = None) -> bool:
        """Waits like `Started.wait`."""
        end = None if seconds is None else time.monotonic() + seconds
        polls = 0
        while not self.is_done():
            if end is not None and time.monotonic() >= end:
                return False
            polls += 1
            time.sleep(0 if polls < _SPINS else _PAUSE_S)
        return True

    def error(self) -> Exception | None:
        return self._error


class MessageWork(DdlWork):
    """The work of send and recv, which knows the sender."""

    def __init__(self, tensor: torch.Tensor, message: Message, received: torch.Tensor | None) -> None:
        super().__init__([tensor], message, None if received is None else lambda _: tensor.copy_(received))
        self._message = message

    def source_rank(self) -> int | None:
        """Returns the rank of the sender."""
        self.wait()
        return self._message.source

    _source_rank = source_rank


class PointToPoint:
    """Sends and receives between the ranks of a communicator. The constructor is COLLECTIVE."""

    def __init__(self, comm: Communicator, timeout: timedelta) -> None:
        self._comm = comm
        self._timeout = timeout
        self._messages: Any = comm.native().for_messages() if comm.size > 1 else None
        self._clean = True
        self._under_way: list[Message] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> MessageWork:
        """Starts to send; `tensor` must not change until the work is done."""
        data = _bytes(tensor.cpu())
        what = f"send of {data.nbytes} bytes to rank {to}, tag {tag},"
        self._check("send", to, tag)
        return self._begin(tensor, lambda: self._messages.send(data, to, tag), None, what)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> MessageWork:
        """Starts to receive; `source` None: from any rank. The message must have the size of `tensor`."""
        on_host = torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor
        data = _bytes(on_host)
        sender = "any rank" if source is None else f"rank {source}"
        what = f"recv of {data.nbytes} bytes from {sender}, tag {tag},"
        self._check("recv", source, tag)
        received = on_host if tensor.is_cuda else None
        return self._begin(tensor, lambda: self._messages.receive(data, source, tag), data.nbytes, what, received)

    def close(self) -> None:
        """Leaves the group. Messages in progress fail."""
        with self._changed:
            closed, self._closed = self._closed, True
            self._changed.notify_all()
            for message in self._under_way:
                message.give_up()
            self._forget_done()
            if not closed and self._messages is not None:
                self._messages.leave(clean=self._clean)

    def _check(self, call: str, peer: int | None, tag: int) -> None:
        self._comm.native()  # raises when closed
        known = self._messages is not None and (
            peer is None or (0 <= peer < self._comm.size and peer != self._comm.rank)
        )
        if not known:
            raise ConfigError(
                f"{call}: the peer must be another rank, from 0 to {self._comm.size - 1}. Received: {peer} on rank "
                f"{self._comm.rank}."
            )
        if not 0 <= tag <= self._messages.largest_tag:
            raise ConfigError(
                f"{call}: the tag must be 0 to {self._messages.largest_tag}. Received: {tag} on rank {self._comm.rank}."
            )

    def _begin(
        self,
        tensor: torch.Tensor,
        begin: Callable[[], Any],
        length: int | None,
        what: str,
        received: torch.Tensor | None = None,
    ) -> MessageWork:
        with self._changed:
            if self._closed:
                raise NotInitializedError(f"{what} on rank {self._comm.rank}: the group is shut down.")
            message = Message(begin(), length, f"{what} on rank {self._comm.rank}", self._timeout)
            self._under_way.append(message)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="keras_ddl messages", daemon=True)
                self._thread.start()
        return MessageWork(tensor, message, received)

    def _forget_done(self) -> None:
        done = [each for each in self._under_way if each.is_done()]
        self._under_way = [each for each in self._under_way if each not in done]
        self._clean = self._clean and all(each.is_over for each in done)

    def _poll(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                self._forget_done()
                if not self._under_way:
                    self._changed.wait()
            time.sleep(20 * _PAUSE_S)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
