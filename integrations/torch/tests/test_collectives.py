"""Backend "ddl" of torch.distributed on several ranks: collectives, contract, training."""

from pathlib import Path

import pytest
from torch_needs import TORCH

from harness.rank_tests import rank_tests

pytestmark = TORCH

HERE = Path(__file__).parent
# A check requires that TensorFlow is not imported.
CHECKS = [HERE / f"{name}_checks.py" for name in ("collective", "group", "training", "contract")]

test_of_two = rank_tests(CHECKS[1:], [2])  # the first are in test_smoke.py
test_of_more = pytest.mark.long(rank_tests(CHECKS, [1, 3, 4]))
