"""Checks of the harness itself that pass, fail, skip and hang in known ways."""

import time

from harness.rank_program import long, rank, size, skip


def check_passes():
    assert 0 <= rank() < size()


def check_fails_on_the_last_rank():
    assert rank() != size() - 1, "as planned"


def check_skips():
    skip("as planned")


@long
def check_runs_after_a_failure():
    pass


def check_hangs_on_rank_0():
    if rank() == 0:
        time.sleep(1000)
