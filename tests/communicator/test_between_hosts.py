"""Connections without MPI between ranks of different hosts: here threads, each with a Doorkeeper."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from keras_ddl.communicator.transports.between_hosts import Door, Doorkeeper
from keras_ddl.config import Seconds
from keras_ddl.errors import RankLostError
from keras_ddl.link import listener
from keras_ddl.link.connections import Unproven
from keras_ddl.link.listener import Caller, Listener

SECRET = "5e" * 32


def doors_of(keepers: list[Doorkeeper], hosts: str) -> dict[int, Door]:
    return {each.rank: Door("127.0.0.1", int(each.describe()["port"]), hosts[each.rank]) for each in keepers}


def keepers_on(hosts: str) -> list[Doorkeeper]:
    """Returns one Doorkeeper for each letter, which names the rank's host."""
    keepers = [Doorkeeper(rank) for rank in range(len(hosts))]
    for each in keepers:
        each.introduce(doors_of(keepers, hosts), SECRET)
    return keepers


def patient(missing: list[int]) -> None:
    """Waits without a limit."""


def connect_all(keepers: list[Doorkeeper], ranks: list[int], key: str = "world") -> list[dict[int, socket.socket]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: keepers[rank].connect(key, ranks, patient), ranks))


def test_all_pairs_of_ranks_on_different_hosts_are_connected() -> None:
    connections = connect_all(keepers_on("aabc"), [0, 1, 2, 3])
    assert [sorted(each) for each in connections] == [[2, 3], [2, 3], [0, 1, 3], [0, 1, 2]]
    for rank, row in enumerate(connections):
        for other, connection in row.items():
            connection.sendall(b"%d%d" % (rank, other))
    for rank, row in enumerate(connections):
        for other, connection in row.items():
            assert connection.recv(2) == b"%d%d" % (other, rank)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            connection.close()


def test_concurrent_transports_do_not_mix() -> None:
    keepers = keepers_on("ab")
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda key: connect_all(keepers, [0, 1], key), ["one", "other"])
    one[0][1].sendall(b"1")
    other[0][1].sendall(b"2")
    assert (one[1][0].recv(1), other[1][0].recv(1)) == (b"1", b"2")


def test_early_rank_waits_for_ranks_that_are_not_introduced_yet() -> None:
    keepers = [Doorkeeper(rank) for rank in range(2)]
    doors = doors_of(keepers, "ab")
    keepers[1].introduce(doors, SECRET)
    threading.Timer(0.3, keepers[0].introduce, [doors, SECRET]).start()
    assert list(keepers[1].connect("world", [0, 1], patient)) == [0]


def raises(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(RankLostError, match=text):
        call()


def test_rank_with_a_closed_door_is_lost_to_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seconds, "LOOK_AGAIN", 0.1)
    keepers = keepers_on("abc")
    keepers[1]._door.shutdown(socket.SHUT_RDWR)
    keepers[1]._door.close()
    raises(lambda: keepers[0].connect("world", [0, 1, 2], patient), "rank 1 died, or cannot be reached")
    raises(lambda: keepers[2].connect("world", [1, 2], patient), "rank 1 died, or cannot be reached")


def test_waiting_for_a_rank_that_gave_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seconds, "LOOK_AGAIN", 0.1)
    keepers = keepers_on("ab")

    def impatient(missing: list[int]) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        keepers[0].connect("world", [0, 1], impatient)
    raises(lambda: keepers[1].connect("world", [0, 1], patient), "rank 0 no longer waits")
    raises(lambda: keepers[0].connect("world", [0, 1], patient), "rank 1 no longer waits")
    assert [list(each) for each in connect_all(keepers, [0, 1], "again")] == [[1], [0]]


def test_strangers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = keepers_on("ab")
    stranger = Doorkeeper(1)
    stranger.introduce(doors_of(keepers, "ab"), "0c" * 32)
    monkeypatch.setattr(Seconds, "MEET", 0.5)
    raises(lambda: stranger.connect("world", [0, 1], patient), "rank 0 died")
    assert not keepers[0]._arrived


def test_another_process_at_a_ranks_door_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seconds, "MEET", 0.5)
    keepers = keepers_on("ab")
    other = Doorkeeper(0)  # belongs to another job
    other.introduce({}, "0c" * 32)
    doors = doors_of([other, keepers[1]], "ab")
    keepers[1].introduce(doors, SECRET)
    raises(lambda: keepers[1].connect("world", [0, 1], patient), "rank 0 (died|cannot be reached)")


def is_pushed_out(connection: socket.socket) -> bool:
    connection.settimeout(60)
    try:
        while connection.recv(64):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("is_introduced", [True, False])
def test_only_a_few_strangers_are_connected_at_a_time(is_introduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Also at the start, when nobody can prove anything yet. No thread waits for a stranger.
    monkeypatch.setattr(listener, "_MAX_STRANGERS", 50)
    monkeypatch.setattr(Seconds, "PROOF", 3600.0)
    keepers = [Doorkeeper(rank) for rank in range(2)]
    doors = doors_of(keepers, "ab")
    for each in keepers if is_introduced else keepers[1:]:
        each.introduce(doors, SECRET)
    threads = threading.active_count()
    address = ("127.0.0.1", int(keepers[0].describe()["port"]))
    silent = [socket.create_connection(address) for _ in range(400)]
    assert all(is_pushed_out(each) for each in silent[:300])
    assert len(keepers[0]._listener._unproven) <= 51 and threading.active_count() == threads
    with ThreadPoolExecutor(1) as pool:
        knocking = pool.submit(keepers[1].connect, "world", [0, 1], patient)
        if not is_introduced:
            with pytest.raises(TimeoutError):
                knocking.result(0.3)
            keepers[0].introduce(doors, SECRET)
        keepers[0].connect("world", [0, 1], patient)
        knocking.result()
    for each in silent:
        each.close()


def test_rank_pushed_out_by_strangers_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = keepers_on("ab")
    serve, pushed_out = Listener.serve, []

    def after_strangers(door: Listener, fd: int) -> Caller | None:
        if len(pushed_out) < 3 and fd in door._unproven:
            pushed_out.append(fd)
            door._unproven.pop(fd).channel.close()
            return None
        return serve(door, fd)

    monkeypatch.setattr(Listener, "serve", after_strangers)
    assert [list(each) for each in connect_all(keepers, [0, 1])] == [[1], [0]]
    assert len(pushed_out) == 3


def test_flooding_address_blocks_only_itself() -> None:
    unproven: Unproven[int] = Unproven(10)
    assert unproven.add(0, "a rank", 0) is None
    out = [unproven.add(each, "a stranger", each) for each in range(1, 100)]
    assert out == [None] * 9 + list(range(1, 91)) and 0 in unproven and list(unproven) == [0, *range(91, 100)]
    assert unproven.pop(0) == 0 and len(unproven) == 9
    assert [unproven.add(each, f"address {each}", each) for each in (200, 201)] == [None, 91]
