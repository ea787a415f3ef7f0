"""Backend "ddl" of torch.distributed on two ranks."""

from pathlib import Path

from torch_needs import TORCH

from harness.rank_tests import rank_tests

pytestmark = TORCH

test_collectives_of_two = rank_tests(Path(__file__).with_name("collective_checks.py"), [2])
