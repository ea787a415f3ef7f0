"""Messages between two ranks of one host, over a transport of their own; what `mpi.MpiMessages` is for MPI."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

from keras_ddl import errors
from keras_ddl.communicator.native_library import core


class HostMessages:
    """Sends and receives; any thread. Takes over the transport."""

    largest_tag = 2**31 - 1

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._receives: list[_Receive] = []  # in the order in which they were begun, which is that of the messages
        functions, call = transport.functions, ctypes.CFUNCTYPE
        begin = (c_int, c_void_p, c_int, c_int, c_void_p, c_size_t, c_void_p)
        self._isend, self._irecv = call(*begin)(functions[1]), call(*begin)(functions[2])
        self._test = call(c_int, c_void_p, c_void_p, c_void_p)(functions[3])
        self._cancel = call(c_int, c_void_p, c_void_p)(functions[4])

    def send(self, data: Any, to: int, tag: int) -> _Operation:
        """Begins to send the bytes of a NumPy array."""
        operation = _Operation(self, data)
        with self._lock:
            operation.begin(self._isend, to, tag, data.ctypes.data, data.nbytes)
        return operation

    def receive(self, data: Any, source: int | None, tag: int) -> _Receive:
        """Begins to receive into the memory of a NumPy array, from any rank for None."""
        operation = _Receive(self, data, source, tag)
        with self._lock:
            self._receives.append(operation)
        return operation

    def leave(self, *, clean: bool) -> None:
        """Gives it up."""
        with self._lock:
            self._transport.destroy()

    def _match(self) -> None:
        """Gives each receive the message that is there for it."""
        peer, length = c_int(), c_size_t()
        for receive in tuple(self._receives):
            source = -1 if receive.wanted is None else receive.wanted
            code = core().ddl_host_probe(byref(self._transport), source, receive.tag, byref(peer), byref(length))
            if code:
                raise errors.from_code(code, self._transport.last_error())
            if peer.value >= 0:
                self._receives.remove(receive)
                receive.take(peer.value, length.value)


class _Operation:
    """A message under way. `source` and `length`: of one that has come."""

    source: int | None = None
    length: int | None = None

    def __init__(self, messages: HostMessages, data: Any) -> None:
        self._messages, self._data = messages, data
        self._operation = c_void_p()
        self._begun = False

    def begin(self, call: Any, peer: int, tag: int, address: int, length: int) -> None:
        transport = self._messages._transport
        code = call(transport.self, peer, tag, address, length, byref(self._operation))
        if code:
            raise errors.from_code(code, transport.last_error())
        self._begun = True

    def test(self) -> bool:
        """Whether it is over. Raises: KerasDdlError: it failed."""
        messages = self._messages
        with messages._lock:
            messages._match()
            if not self._begun:
                return False
            finished = c_int()
            code = messages._test(messages._transport.self, byref(self._operation), byref(finished))
            if code:
                raise errors.from_code(code, messages._transport.last_error())
            return bool(finished.value)

    def cancel(self) -> bool:
        """Gives it up; returns whether its memory is free."""
        messages = self._messages
        with messages._lock:
            if self in messages._receives:
                messages._receives.remove(self)
            if not self._operation:
                return True
            return bool(messages._cancel(messages._transport.self, byref(self._operation)) == 0)


class _Receive(_Operation):
    def __init__(self, messages: HostMessages, data: Any, source: int | None, tag: int) -> None:
        super().__init__(messages, data)
        self.wanted, self.tag = source, tag

    def take(self, source: int, length: int) -> None:
        """Receives a message that is there."""
        self.source, self.length = source, length
        if length > self._data.nbytes:  # it goes elsewhere; whoever waits is told of both lengths
            self._data = ctypes.create_string_buffer(length)
            address = ctypes.addressof(self._data)
        else:
            address = self._data.ctypes.data
        self.begin(self._messages._irecv, source, self.tag, address, length)
