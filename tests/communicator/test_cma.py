"""Cross memory attach: used where the system lets it, never where it is not wanted, and with the same bits."""

import ctypes
import os
import time

import pytest

from harness.rank_tests import run_ranks

pytestmark = pytest.mark.parallel


class Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def in_child(function):
    """Returns the process id of a child that runs `function`, and ends with its result."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = function()
        finally:
            os._exit(code)
    return child


def system_allows_it():
    """Whether a child of this process may read its sibling, as ranks of one mpirun do."""
    word, copy = ctypes.create_string_buffer(b"word"), ctypes.create_string_buffer(4)
    libc, number = ctypes.CDLL(None), ctypes.c_ulong
    reading, writing = os.pipe()

    def wait_to_be_read():
        os.write(writing, b".")
        time.sleep(30)
        return 0

    victim = in_child(wait_to_be_read)

    def read():
        os.read(reading, 1)
        mine, theirs = Piece(ctypes.addressof(copy), 4), Piece(ctypes.addressof(word), 4)
        one = number(1)
        got = libc.process_vm_readv(victim, ctypes.byref(mine), one, ctypes.byref(theirs), one, number(0))
        return 0 if got == 4 else 1

    status = os.waitstatus_to_exitcode(os.waitpid(in_child(read), 0)[1])
    os.kill(victim, 9)
    os.waitpid(victim, 0)
    os.close(reading)
    os.close(writing)
    return status == 0


def reduces_all_sizes():
    """Returns the description and a digest of results, which are the same in every scheme that the tuner tries."""
    import hashlib

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator

    keras_ddl.init()
    digest = hashlib.blake2b()
    for count in (5_000, 17_389, 100_000, 3_000_000):
        random = np.random.default_rng(count + keras_ddl.rank())
        data = random.standard_normal(count).astype(np.float32)
        first = communicator.all_reduce_array(data, name="first")
        digest.update(first)
        for turn in range(20):  # there are up to nine schemes, of which each is tried four times in a row
            assert np.array_equal(communicator.all_reduce_array(data, name="again"), first)
            result = data[turn:].copy()  # in place, and at every alignment
            communicator.all_reduce_array(result, name="in place", out=result)
            assert np.array_equal(result, first[turn:]), (count, turn)
    return communicator.describe(), digest.hexdigest()


@pytest.mark.long  # native/tests/shm has the bits
def test_results_do_not_depend_on_it():
    digests, allowed = set(), system_allows_it()
    for wanted in ("1", "0"):
        for rank in run_ranks(reduces_all_sizes, 3, env={"KERAS_DDL_CMA": wanted}).check().ranks:
            description, digest = rank.result
            assert ("cross memory attach" in description) == (allowed and wanted == "1"), description
            digests.add(digest)
    assert len(digests) == 1, "the ranks, or the schemes, differ in bits"


def test_ranks_that_want_different_things_are_told_so():
    def work():
        import os

        from harness.rank_program import rank

        os.environ["KERAS_DDL_CMA"] = str(rank() % 2)
        import keras_ddl

        keras_ddl.init()

    outcome = run_ranks(work, 2)
    assert outcome.returncode != 0
    assert "KERAS_DDL_CMA" in outcome.text(), outcome.text()
