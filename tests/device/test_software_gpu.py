"""keras_ddl on software GPUs: which GPU and memory a rank uses, and that no collective touches device memory."""

import subprocess
from pathlib import Path

import pytest

from device import software_gpu
from harness.launching import without_mpi
from harness.rank_program import rank
from harness.rank_tests import rank_tests, run_ranks
from launch.launching import run

test_of_two = rank_tests(
    Path(__file__).with_name("software_gpu_checks.py"), [2], env=software_gpu.environment, mpi=False
)


def on_software_gpus(program, ranks, num_devices=2, **env):
    return run_ranks(program, ranks, env={**software_gpu.environment(num_devices), **env}, mpirun=without_mpi(ranks))


@pytest.mark.parallel
def test_kernels_without_host_memory_crash(tmp_path):
    """Registers keras_ddl's kernels without host memory: the software GPU notices that they read device memory."""

    def reduce():
        from keras_ddl import communicator, ops
        from keras_ddl.compat.tensorflow import tf

        communicator.init()
        ops.all_reduce(tf.constant(1.0) + 1.0)

    forgetful = tmp_path / "forgetful.so"
    code = 'extern "C" void TF_KernelBuilder_HostMemory(void*, const char*) {}'
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", forgetful], input=code, text=True, check=True)
    outcome = on_software_gpus(reduce, 2, LD_PRELOAD=str(forgetful))
    assert outcome.returncode != 0
    assert "Segmentation fault" in "".join(each.stderr for each in outcome.ranks), outcome.text()


@pytest.mark.parallel
def test_ranks_warn_if_they_share_a_gpu_or_see_all():
    """Runs three ranks on two GPUs; TensorFlow has already started on the last two."""

    def choose():
        import warnings

        from keras_ddl import communicator, device
        from keras_ddl.compat.tensorflow import tf

        if rank() > 0:
            tf.constant(1.0) + 1.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = device.choose_device(communicator.init())
        gpus = tf.config.list_physical_devices("GPU")
        visible = [gpus.index(each) for each in tf.config.get_visible_devices("GPU")]
        growth = [tf.config.experimental.get_memory_growth(each) for each in gpus]
        return chosen, visible, growth, [str(each.message) for each in caught]

    ranks = [each.result for each in on_software_gpus(choose, 3).check().ranks]
    assert [each[:3] for each in ranks] == [
        ("/device:GPU:0", [0], [True, None]),
        ("/device:GPU:1", [0, 1], [None, None]),
        ("/device:GPU:0", [0, 1], [None, None]),
    ]
    (shares,), (starts,), (does_both,) = (each[3] for each in ranks)
    assert "Ranks 0, 2 share a GPU" in shares and "each takes memory as it needs it" in shares
    assert "Rank 1 computes on GPU 1, but takes memory on all 2" in starts
    assert "TensorFlow had started" in does_both


def test_info_lists_gpus_with_their_ranks(tmp_path):
    shown = run(["info"], tmp_path, env=software_gpu.environment())
    assert "GPU 1       SOFTWARE_GPU: local rank 1 computes on it\n  TensorFlow  sees 2" in shown.out, shown
