"""Sends the bytes of an all-reduce through plain sockets, without MPI and without additions: a bound set by the links.

One rank of each host sends to the next host of its rack and, at the same time, to the same host of the next rack. With
h hosts in each of R racks it sends 2 (h-1)/h N and 2 (R-1)/R N/h bytes, and receives as many. Any all-reduce must send
that much, and here no step waits for another. So any extra time of an all-reduce is not due to the links.
"""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
from mpi4py import MPI

PIECE = 256 << 10  # bytes handed to the kernel at once


class TcpStreams:
    """Connections between the hosts of `comm`, whose ranks are placed host by host, hosts rack by rack. COLLECTIVE."""

    def __init__(self, comm: MPI.Intracomm, racks: int) -> None:
        self._comm = comm.Dup()
        name = MPI.Get_processor_name()
        names = list(dict.fromkeys(comm.allgather(name)))
        per_rack, here = len(names) // racks, names.index(name)
        is_sender = comm.allgather(name).index(name) == comm.rank
        rack, place = divmod(here, per_rack)
        self._streams: list[tuple[socket.socket, socket.socket, float]] = []  # to, from, bytes as a fraction of N
        # (next host, hosts in the ring, divisor of N)
        rings = [
            (rack * per_rack + (place + 1) % per_rack, per_rack, 1),
            ((here + per_rack) % len(names), racks, per_rack),
        ]
        for following, size, divisor in rings:
            if size == 1:
                continue
            listening = socket.create_server(("", 0)) if is_sender else None
            ports = dict(comm.allgather((name, listening.getsockname()[1]) if listening else ("", 0)))
            if listening:
                outgoing = socket.create_connection((names[following], ports[names[following]]))
                incoming, _ = listening.accept()
                listening.close()
                self._streams.append((outgoing, incoming, 2 * (size - 1) / size / divisor))

    def __call__(self, source: np.ndarray, result: np.ndarray) -> None:
        """Sends and receives as much as an all-reduce of `source`; `result` is scratch memory. COLLECTIVE."""
        threads = []
        for outgoing, incoming, fraction in self._streams:
            nbytes = int(fraction * source.nbytes)
            threads.append(threading.Thread(target=_send, args=(outgoing, memoryview(source).cast("B"), nbytes)))
            threads.append(threading.Thread(target=_receive, args=(incoming, memoryview(result).cast("B"), nbytes)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Ranks that do not send must not occupy a core of their host while they wait.
        everywhere = self._comm.Ibarrier()
        while not everywhere.Test():
            time.sleep(0.2e-3)


def _send(to: socket.socket, data: memoryview, nbytes: int) -> None:
    while nbytes > 0:
        nbytes -= to.send(data[: min(PIECE, nbytes)])


def _receive(sender: socket.socket, memory: memoryview, nbytes: int) -> None:
    while nbytes > 0:
        received = sender.recv_into(memory, min(PIECE, nbytes, len(memory)))
        if received == 0:
            raise ConnectionError("the sending rank has ended")
        nbytes -= received
