"""Which ranks a job may lose and go on: what the tests that kill ranks choose from."""

RANK_0_MAY_BE_LOST = False


def victims(size: int) -> list[int]:
    """Returns the ranks, of `size`, without which the others go on."""
    return list(range(0 if RANK_0_MAY_BE_LOST else 1, size))
