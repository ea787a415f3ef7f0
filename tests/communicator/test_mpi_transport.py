"""The MPI transport below the engine: messages of any length, probes, error texts, leaving with pending requests."""

import pytest

from harness.rank_tests import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def transport_program(piece):
    import ctypes
    import time
    from ctypes import byref, c_int, c_size_t, c_void_p

    import numpy as np
    from mpi4py import MPI

    from keras_ddl.communicator.native import native_library

    world = MPI.COMM_WORLD
    rank, peer = world.rank, 1 - world.rank
    transport = native_library.Transport()
    error = ctypes.create_string_buffer(1000)
    assert native_library.mpi_shim().ddl_mpi_create(world.py2f(), byref(transport), error, 1000) == 0, error.value
    assert (transport.rank, transport.size, transport.abi_version) == (rank, 2, native_library.ABI_VERSION)
    own = transport.self

    functions = transport.functions
    all_gather, isend, irecv, test = functions.all_gather, functions.isend, functions.irecv, functions.test
    cancel, probe, last_error, destroy = functions.cancel, functions.probe, functions.last_error, functions.destroy

    def start(call, array, tag, to=peer):
        operation = c_void_p()
        code = call(own, to, tag, array.ctypes.data, array.nbytes, byref(operation))
        assert code == 0, last_error(own)
        return operation

    def finish(*operations):
        deadline = time.monotonic() + 60
        for operation in operations:
            finished = c_int(0)
            while not finished.value:
                assert test(own, byref(operation), byref(finished)) == 0, last_error(own)
                assert time.monotonic() < deadline
            assert operation.value is None

    def look(tag):
        sender, length = c_int(7), c_size_t(7)
        assert probe(own, tag, byref(sender), byref(length)) == 0
        return sender.value, length.value

    gathered = np.zeros(2, np.int64)
    assert all_gather(own, np.array([rank + 5]).ctypes.data, gathered.ctypes.data, 8) == 0
    assert gathered.tolist() == [5, 6]

    # Both directions at once: 0 bytes, 1 byte, several pages.
    for tag, length in enumerate((0, 1, 70_000)):
        out, into = np.full(length, rank + 1, np.uint8), np.zeros(length, np.uint8)
        finish(start(irecv, into, tag), start(isend, out, tag))
        assert (into == peer + 1).all()

    # At 1 GiB a message has several pieces, the last one short. Only bytes at the seams are written.
    large = np.zeros(piece + 5, np.uint8)
    seams = [0, 1, 1 << 20, piece - 1, piece, piece + 4]
    if rank == 0:
        large[seams] = range(1, 7)
        finish(start(isend, large, 9))
    else:
        finish(start(irecv, large, 9))
        assert large[seams].tolist() == list(range(1, 7))
    del large

    # A probe finds a message by its tag alone, with its sender and length; the message is received afterwards.
    assert look(55) == (-1, 0)
    world.Barrier()
    out = np.arange(9, dtype=np.uint8)
    sent = start(isend, out, 44)
    deadline = time.monotonic() + 60
    while look(44)[0] < 0:
        assert look(55) == (-1, 0)
        assert time.monotonic() < deadline
    assert look(44) == (peer, 9)
    into = np.zeros(9, np.uint8)
    finish(start(irecv, into, 44), sent)
    assert into.tolist() == list(range(9))

    # MPI's errors are returned as codes with a text, and later calls still work.
    operation = c_void_p()
    assert isend(own, 99, 1, into.ctypes.data, 9, byref(operation)) == 13
    text = last_error(own).decode()
    assert text.startswith(f"rank {rank}: MPI_Isend, peer 99, 9 bytes: "), text
    assert "rank" in text.split(": ", 2)[2]
    finish(start(irecv, into, 66), start(isend, out, 66))

    # A receive without a match can be cancelled, and later messages do not write to its memory.
    given_up, later = np.zeros(9, np.uint8), np.zeros(9, np.uint8)
    operation = start(irecv, given_up, 71)
    assert cancel(own, byref(operation)) == 0, last_error(own)
    assert operation.value is None
    world.Barrier()
    finish(start(irecv, later, 71), start(isend, out, 71))
    assert later.tolist() == list(range(9))
    assert not given_up.any()

    # Leaving with a receive that nothing matches, and a message that nobody receives.
    start(irecv, into, 77)
    lost = np.zeros(5_000_000 if rank else 3, np.uint8)
    start(isend, lost, 88)
    begin = time.monotonic()
    destroy(own)
    assert time.monotonic() - begin < 60
    return "done"


@pytest.mark.parametrize("piece", [1 << 21, pytest.param(1 << 30, marks=pytest.mark.long)])
def test_transport_carries_messages_and_errors(piece):
    outcome = run_ranks(transport_program, 2, args=(piece,)).check()
    assert [rank.result for rank in outcome.ranks] == ["done", "done"]


def test_transport_needs_initialised_mpi():
    def work():
        import ctypes

        from keras_ddl.communicator.native import native_library

        error = ctypes.create_string_buffer(1000)
        code = native_library.mpi_shim().ddl_mpi_create(0, ctypes.byref(native_library.Transport()), error, 1000)
        return code, error.value.decode(), native_library.mpi_text("ddl_mpi_loaded_version")

    code, text, version = run_ranks(work, 1).check().ranks[0].result
    assert code == 9
    assert "Received: not initialised" in text
    assert version.startswith("Open MPI v5")
