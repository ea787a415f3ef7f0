"""Point-to-point messages between ranks of one host; `mpi.MpiMessages` has the same interface over MPI."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any

from keras_ddl.communicator.native.native_library import Transport, core

if TYPE_CHECKING:
    import numpy as np


class HostMessages:
    """Sends and receives messages over a transport, which it takes over. Any thread may call its methods."""

    largest_tag = 2**31 - 1

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._functions = transport.functions
        self._lock = threading.Lock()
        self._receives: list[_Receive] = []  # an earlier receive matches a message first

    def send(self, data: np.ndarray, to: int, tag: int) -> _Operation:
        """Begins to send the bytes of an array."""
        operation = _Operation(self, data)
        with self._lock:
            operation.begin(self._functions.isend, to, tag, data.ctypes.data, data.nbytes)
        return operation

    def receive(self, data: np.ndarray, source: int | None, tag: int) -> _Receive:
        """Begins to receive into the memory of an array, from rank `source`, or any rank for None."""
        operation = _Receive(self, data, source, tag)
        with self._lock:
            self._receives.append(operation)
        return operation

    def leave(self, *, clean: bool) -> None:
        """Frees the transport. `clean` matters only to MPI."""
        with self._lock:
            self._transport.destroy()

    def _match(self) -> None:
        """Begins each receive for which a message has arrived."""
        peer, length = c_int(), c_size_t()
        for receive in tuple(self._receives):
            source = -1 if receive.wanted_source is None else receive.wanted_source
            code = core().ddl_host_probe(byref(self._transport), source, receive.tag, byref(peer), byref(length))
            if code:
                raise self._transport.error(code)
            if peer.value >= 0:
                self._receives.remove(receive)
                receive.begin_from(peer.value, length.value)


class _Operation:
    """A send or a receive. `source` and `length` describe the message that a receive has matched."""

    source: int | None = None
    length: int | None = None

    def __init__(self, messages: HostMessages, data: np.ndarray) -> None:
        self._messages = messages
        self._data: Any = data  # keeps the memory alive
        self._operation = c_void_p()
        self._begun = False

    def begin(self, call: Callable[..., int], peer: int, tag: int, address: int, length: int) -> None:
        transport = self._messages._transport
        code = call(transport.self, peer, tag, address, length, byref(self._operation))
        if code:
            raise transport.error(code)
        self._begun = True

    def test(self) -> bool:
        """Whether the operation is done. Raises: KerasDdlError: it failed."""
        messages = self._messages
        with messages._lock:
            messages._match()
            if not self._begun:
                return False
            finished = c_int()
            code = messages._functions.test(messages._transport.self, byref(self._operation), byref(finished))
            if code:
                raise messages._transport.error(code)
            return bool(finished.value)

    def cancel(self) -> bool:
        """Cancels the operation; returns whether its memory is no longer in use."""
        messages = self._messages
        with messages._lock:
            if self in messages._receives:
                messages._receives.remove(self)
            if not self._operation:
                return True
            return bool(messages._functions.cancel(messages._transport.self, byref(self._operation)) == 0)


class _Receive(_Operation):
    def __init__(self, messages: HostMessages, data: np.ndarray, source: int | None, tag: int) -> None:
        super().__init__(messages, data)
        self.wanted_source, self.tag = source, tag

    def begin_from(self, source: int, length: int) -> None:
        """Begins to receive a message that has arrived."""
        self.source, self.length = source, length
        if length > self._data.nbytes:  # too long: receive it elsewhere, and let the caller report the mismatch
            self._data = ctypes.create_string_buffer(length)
            address = ctypes.addressof(self._data)
        else:
            address = self._data.ctypes.data
        self.begin(self._messages._functions.irecv, source, self.tag, address, length)
