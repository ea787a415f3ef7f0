"""Two hosts, of which the second's first rank passes on what its ranks announce: the same results and errors."""

import inspect
import textwrap

import pytest

from harness.emulated_hosts import emulated_hosts
from harness.rank_tests import run_ranks


def work():
    import threading

    import numpy as np

    import keras_ddl
    from keras_ddl import communicator, errors

    keras_ddl.init()
    rank, size = keras_ddl.rank(), keras_ddl.size()

    def collectives():
        for step in range(20):
            total = communicator.all_reduce_array(np.full(3, rank, np.float32), name="total")
            assert total.tolist() == [sum(range(size))] * 3
            objects = communicator.all_gather_object("x" * rank * (step % 3), name="objects")
            assert objects == ["x" * r * (step % 3) for r in range(size)]

    before = communicator.count()["control_received"]
    collectives()
    received = communicator.count()["control_received"] - before
    # Of the two ranks of the other host rank 0 hears together, unless one is late; alone they would send 40 times each.
    if rank == 0:
        assert 80 <= received < 110, received

    others = [threading.Thread(target=keras_ddl.barrier, kwargs={"name": f"thread {i}"}) for i in range(3)]
    for thread in others if rank % 2 else others[::-1]:
        thread.start()
    for thread in others:
        thread.join()

    for wrong in (1, 3):  # of either host
        try:
            communicator.all_reduce_array(np.zeros(5 if rank == wrong else 4, np.float32), name="wrong")
        except errors.RankMismatchError as error:
            right = ", ".join(str(r) for r in range(size) if r != wrong)
            for words in (f"4 on rank(s) {right}", f"5 on rank(s) {wrong}"):
                assert words in str(error), error
        else:
            raise AssertionError("must fail")
    collectives()

    for step in range(3 if rank in (1, 2) else 0):
        assert communicator.all_reduce_array(np.ones(2, np.float32), name=f"while joined {step}").tolist() == [2, 2]
    assert keras_ddl.join() in (1, 2)

    part = keras_ddl.split("a" if rank < 3 else "b")  # the first of its second host is rank 2, alone
    assert communicator.all_reduce_array(np.ones(1), comm=part).tolist() == [3 if rank < 3 else 1]
    collectives()
    if rank == 0:
        print("all as without", flush=True)


@pytest.mark.parallel
def test_control_tree_of_groups_gives_the_same():
    outcome = run_ranks(work, 4, mode="x:2x2", env={"KERAS_DDL_CONTROL_FAN_IN": "1"}, timeout=60)
    assert outcome.returncode == 0, outcome.text()
    assert "all as without" in outcome.ranks[0].stdout


@pytest.mark.long
@pytest.mark.alone
def test_control_tree_over_two_hosts(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(inspect.getsource(work)) + "\n\nwork()\n")
    with emulated_hosts(tmp_path, 2) as hosts:
        words = ("run", "-H", "h0:2,h1:2", "--mpi-arg", hosts.agent, "python", "program.py")
        shown = hosts.run("keras-ddl", *words, env={"KERAS_DDL_CONTROL_FAN_IN": "1"})
    assert "all as without" in shown
