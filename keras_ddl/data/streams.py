"""Streams of batches from rank 0 to all ranks, read ahead of the steps; `from_rank_0.py` makes datasets of them.

One pass over a dataset is one stream. On rank 0 a thread reads the pass, a few batches before they are used, and sends
each rank its part; on every other rank a thread receives. Only rank 0 decides what is sent, so a rank that stops
reading earlier leaves no other rank waiting: it receives the rest and drops it until rank 0 stops, too. Messages travel
in a separate communicator, by an all_to_all in which only rank 0 has something to send, so they do not interfere with
collectives of steps.

Two module variables hold what no single stream can: the errors of streams, which TensorFlow passes on as text only, and
the streams that rank 0 still reads.
"""

from __future__ import annotations

import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_ddl import config
from keras_ddl.communicator import Communicator
from keras_ddl.communicator.first_rank import portable
from keras_ddl.errors import CollectiveError, KerasDdlError, RankMismatchError

AHEAD = 4  # how many batches rank 0 sends ahead of its own steps
_RECEIVED = 2 * AHEAD  # how many batches another rank receives ahead of its steps
_PATIENCE_SECONDS = 10.0  # how long to wait for a thread to end
_ALIGNMENT = 64  # bytes, for the arrays in a message

Parts = list[Any]  # one rank's arrays of a batch

_FAILURE = "keras_ddl's stream"

BATCH, END, ERROR, IDLE, STOP = range(5)

_failures: dict[str, KerasDdlError] = {}  # by the name of the stream


class Message(NamedTuple):
    """A message from rank 0. `content`: the arrays of a BATCH, or the exception of an ERROR."""

    kind: int
    content: Any = None


class Stream:
    """One pass, on one rank.

    Args:
        comm: the communicator of streams.
        name: equal on all ranks, and unique to this stream.
        read: on rank 0, begins the pass, and yields the arrays of every rank, batch by batch.
    """

    def __init__(self, comm: Communicator, name: str, read: Callable[[], Iterator[list[Parts]]] | None = None) -> None:
        self._comm, self._name = comm, f"{comm.prefix}{name}"
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._room = threading.Semaphore(_RECEIVED if read is None else AHEAD)
        self._closed = False
        self._is_root = read is not None
        if self._is_root:
            _streams_of_root.add(self)
        self._thread = threading.Thread(target=self._run, args=(read,), name="keras_ddl data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Parts]:
        """Yields this rank's arrays of each batch.

        Raises: the error of reading on rank 0; errors of collectives; RankMismatchError: rank 0 has stopped reading.
        """
        try:
            while (message := self._messages.get()).kind == BATCH:
                self._room.release()
                yield message.content
            if message.kind == ERROR:
                raise message.content
            if message.kind == STOP:
                raise RankMismatchError(
                    'With Strategy(reader="rank0") all ranks must read the same number of batches. Received: rank '
                    f"{self._comm.rank} asks for one more batch, but rank 0 has stopped reading. End every loop over "
                    "the data after the same batch on every rank."
                )
        finally:
            self.close()

    def close(self) -> None:
        """Ends the pass, without waiting for its thread (`wait_for_closed`)."""
        self._messages.put(Message(END))  # for a reader that is waiting now
        self._closed = True
        self._room.release()

    def wait_if_closed(self) -> None:
        """Waits for a limited time until a closed stream no longer reads its source."""
        if self._closed and threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_SECONDS)

    def _run(self, read: Callable[[], Iterator[list[Parts]]] | None) -> None:
        try:
            if read is None:
                self._receive()
            else:
                self._send(read)
        except Exception as error:  # from a collective; the program's next read raises it
            self._messages.put(Message(ERROR, error))

    # ---- rank 0

    def _send(self, read: Callable[[], Iterator[list[Parts]]]) -> None:
        own = sent = Message(END)
        try:
            for parts in read():
                if not self._wait_for_room():
                    break
                self._scatter([Message(BATCH, each) for each in parts])
                self._messages.put(Message(BATCH, parts[self._comm.rank]))
        except CollectiveError:  # other ranks get the error from the collective itself
            raise
        except Exception as error:
            own, sent = Message(ERROR, error), Message(ERROR, portable(error))
        self._scatter([Message(STOP) if self._closed else sent] * self._comm.size)
        self._messages.put(own)

    def _wait_for_room(self) -> bool:
        """Waits until a step has used one of the sent batches. Returns: whether a rank may use another batch."""
        patience = config.get("WARN_AFTER_SECONDS") / 3 or None
        while not self._closed and not self._room.acquire(timeout=patience):
            self._scatter([Message(IDLE)] * self._comm.size)  # so that no rank waits long enough to warn
        return not self._closed

    def _scatter(self, messages: Sequence[Message]) -> None:
        """Sends every other rank its message."""
        data, lengths = packed([None if r == self._comm.rank else each for r, each in enumerate(messages)])
        self._comm.native().scatter(data, lengths, self._name)

    # ---- other ranks

    def _receive(self) -> None:
        nothing, zeros = np.empty(0, np.uint8), [0] * self._comm.size
        while True:
            if not self._closed:  # a closed stream drops what it receives
                self._room.acquire()
            message = unpacked(self._comm.native().scatter(nothing, zeros, self._name))
            if message.kind == IDLE:
                self._room.release()
            elif not self._closed:
                self._messages.put(message)
            if message.kind in (END, ERROR, STOP):
                return


def wait_for_closed() -> None:
    """On rank 0, before a pass begins: waits for closed passes, which may still be reading the same source."""
    for stream in list(_streams_of_root):
        stream.wait_if_closed()


_streams_of_root: weakref.WeakSet[Stream] = weakref.WeakSet()


class StreamError(Exception):
    """Carries a KerasDdlError through a dataset; `failure_in` finds it again in TensorFlow's error."""

    def __init__(self, name: str, error: KerasDdlError) -> None:
        _failures[name] = error
        super().__init__(f"{_FAILURE} {name}: {error}")


def failure_in(text: str) -> KerasDdlError | None:
    """Returns the error that a stream raised, given TensorFlow's error; None: no stream raised it."""
    if _FAILURE not in text:
        return None
    name = text.partition(_FAILURE)[2].partition(":")[0].strip()
    return _failures.pop(name, None)


def packed(messages: Sequence[Message | None]) -> tuple[np.ndarray, list[int]]:
    """Returns the bytes of all messages in sequence (uint8), and their lengths in bytes. None stands for no message.

    Contiguous arrays are copied once. A message consists of numbers (int64), the pickled rest, and the arrays.
    """
    layouts: list[list[Any]] = []
    for message in messages:
        buffers: list[pickle.PickleBuffer] = []
        rest = b"" if message is None else pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [rest, *(each.raw() for each in buffers)]
        table = np.array([len(views), *(len(each) for each in views)], np.int64)
        layouts.append([] if message is None else [table.view(np.uint8), *views])
    lengths = [sum(_padded(len(each)) for each in layout) for layout in layouts]
    data = np.empty(sum(lengths), np.uint8)
    place = 0
    for view in (each for layout in layouts for each in layout):
        data[place : place + len(view)] = np.frombuffer(view, np.uint8)
        place += _padded(len(view))
    return data, lengths


def unpacked(data: np.ndarray) -> Message:
    """Returns the message in `data`; its arrays are views of `data`."""
    number = int(data[:8].view(np.int64)[0])
    lengths = data[8 : 8 + 8 * number].view(np.int64).tolist()
    place = _padded(8 + 8 * number)
    views = []
    for length in lengths:
        views.append(data[place : place + length])
        place += _padded(length)
    message: Message = pickle.loads(views[0].tobytes(), buffers=views[1:])
    return message


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
