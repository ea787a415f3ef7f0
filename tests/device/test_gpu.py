"""keras_ddl on a GPU, where TensorFlow has one: all ranks share it."""

import pytest

from harness.launching import TESTS
from harness.rank_tests import rank_tests
from keras_ddl import packages
from keras_ddl.packages import nvidia_driver

IS_HERE = bool(packages.is_for_cuda() and nvidia_driver.device_files())
pytestmark = [pytest.mark.long, pytest.mark.skipif(not IS_HERE, reason="needs a GPU and TensorFlow for CUDA")]

CHECKS = TESTS / "device" / "gpu_checks.py"
OPS = [TESTS / "ops" / f"{name}_checks.py" for name in ("ops", "gradient", "failure", "split")]
ON_GPU, THROUGH_HOST = ({"KERAS_DDL_TF_STREAM": path} for path in ("auto", "none"))
test_of_two_and_three = rank_tests(CHECKS, [2, 3], env=ON_GPU, mpi=False)
test_of_two_through_host = rank_tests(CHECKS, [2], env=THROUGH_HOST, mpi=False)
test_ops = rank_tests(OPS, [2], env=ON_GPU, mpi=False)
