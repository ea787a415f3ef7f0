"""What the links carry without MPI and without additions: the bytes of an all-reduce through plain sockets.

One rank of each host sends to the next host of its rack and to its like in the next rack at once, and receives as much:
2 (h-1)/h N and 2 (R-1)/R N/h bytes for h hosts in each of R racks, which is what any all-reduce must send, in the best
order there is: no step waits for another. What an all-reduce takes beyond this is its own doing.
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
        of_rack, here = len(names) // racks, names.index(name)
        speaks = comm.allgather(name).index(name) == comm.rank
        rack, place = divmod(here, of_rack)
        self._streams: list[tuple[socket.socket, socket.socket, float]] = []  # to, from, bytes as a part of N
        rings = [(rack * of_rack + (place + 1) % of_rack, of_rack, 1), ((here + of_rack) % len(names), racks, of_rack)]
        for following, size, share in rings:
            if size == 1:
                continue
            listening = socket.create_server(("", 0)) if speaks else None
            ports = dict(comm.allgather((name, listening.getsockname()[1]) if listening else ("", 0)))
            if listening:
                outgoing = socket.create_connection((names[following], ports[names[following]]))
                incoming, _ = listening.accept()
                listening.close()
                self._streams.append((outgoing, incoming, 2 * (size - 1) / size / share))

    def __call__(self, source: np.ndarray, result: np.ndarray) -> None:
        """Sends and receives what an all-reduce of `source` must; `result` is scratch memory. COLLECTIVE."""
        threads = []
        for outgoing, incoming, part in self._streams:
            nbytes = int(part * source.nbytes)
            threads.append(threading.Thread(target=_send, args=(outgoing, memoryview(source).cast("B"), nbytes)))
            threads.append(threading.Thread(target=_receive, args=(incoming, memoryview(result).cast("B"), nbytes)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The ranks that do not send must not keep their host's core meanwhile.
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
