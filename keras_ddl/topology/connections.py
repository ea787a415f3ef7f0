"""TCP connections between hosts, as the launcher and the ranks use them."""

from __future__ import annotations

import socket


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Makes a TCP connection fail when the other host has not answered for about so many seconds.

    A host that vanishes sends nothing, and otherwise TCP waits for it for hours.
    """
    probe = max(1, round(seconds / 4))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
    ):
        connection.setsockopt(level, option, value)
