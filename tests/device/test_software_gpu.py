"""keras_ddl on software GPUs: which GPU and memory a rank uses, and how collectives take its tensors."""

import re
import subprocess
from pathlib import Path

import pytest

from device import software_gpu
from harness.launching import without_mpi
from harness.rank_program import rank
from harness.rank_tests import rank_tests, run_ranks
from keras_ddl.compat import gpu_stream
from launch.launching import run

CHECKS = Path(__file__).with_name("software_gpu_checks.py")
test_of_two = rank_tests(CHECKS, [2], env=software_gpu.environment, mpi=False)
test_of_two_through_host = pytest.mark.long(
    rank_tests(CHECKS, [2], env=lambda: software_gpu.environment(stream="none"), mpi=False)
)

# A library like gpu_stream.cc that returns a stream on which TensorFlow does not compute.
ANOTHER_STREAM = """
#include <dlfcn.h>
template <typename Result, typename... Arguments>
Result Call(const char* function, Arguments... arguments) {
  void* address = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), function);
  return reinterpret_cast<Result (*)(Arguments...)>(address)(arguments...);
}
extern "C" void* keras_ddl_gpu_stream(void* context, int* ordinal) {
  Call<void*>("keras_ddl_gpu_stream", context, ordinal);
  static void* const another = [ordinal] {
    void *context = nullptr, *stream = nullptr;
    Call<int>("cuDevicePrimaryCtxRetain", &context, *ordinal);
    Call<int>("cuCtxPushCurrent_v2", context);
    Call<int>("cuStreamCreate", &stream, 0u);
    return stream;
  }();
  return another;
}
"""


def compiled(code, path):
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=code, text=True, check=True)
    return path


def on_software_gpus(program, ranks, num_devices=2, stream="", **env):
    env |= software_gpu.environment(num_devices, stream)
    return run_ranks(program, ranks, env=env, mpirun=without_mpi(ranks))


def sums_of_late_values():
    """Returns how many of 40 sums are wrong, or the first error."""
    import keras_ddl
    from keras_ddl import ops
    from keras_ddl.compat.tensorflow import tf
    from keras_ddl.errors import KerasDdlError
    from keras_ddl.ops.errors import translate_errors

    keras_ddl.Strategy()
    total = tf.function(lambda x: ops.all_reduce((x * x + x) * x))
    try:
        with translate_errors():
            return sum(total(tf.fill([1000], x + 0.0)).numpy()[-1] != 2 * (x * x + x) * x for x in range(1, 41))
    except KerasDdlError as error:
        return str(error)


@pytest.mark.parallel
def test_without_the_order_of_streams_sums_are_wrong(tmp_path):
    """Proves that the checks above notice a collective that does not wait for its inputs."""
    another = compiled(ANOTHER_STREAM, tmp_path / "another.so")
    assert all(each.result > 0 for each in on_software_gpus(sums_of_late_values, 2, stream=another).check().ranks)


@pytest.mark.long
@pytest.mark.parallel
def test_library_for_cuda_compiles_and_its_missing_stream_is_an_error(tmp_path):
    """A software GPU has no stream of CUDA, so collectives must fail rather than not wait."""
    library = tmp_path / "stream.so"
    gpu_stream.compile_with_tensorflow([gpu_stream.source()], library, software_gpu.WARNINGS)
    for each in on_software_gpus(sums_of_late_values, 2, stream=library).check().ranks:
        assert "the stream of TensorFlow's GPU must be known" in each.result


@pytest.mark.parallel
def test_lost_rank_ends_a_collective():
    def lose():
        import os
        import signal

        import keras_ddl
        from keras_ddl import device, ops
        from keras_ddl.compat.tensorflow import tf
        from keras_ddl.errors import RankLostError
        from keras_ddl.ops.errors import translate_errors

        strategy = keras_ddl.Strategy()
        total = tf.function(lambda x: ops.all_reduce(x * 2.0, name="total"))
        total(tf.ones([100_000]))
        if strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with translate_errors():
                total(tf.ones([100_000]))
        except RankLostError as error:
            return device.path_of_tensors(), str(error)

    path, message = on_software_gpus(lose, 2).ranks[0].result
    assert path == "collectives take tensors on GPUs"
    assert re.search(r"rank 1 on host \S+ \(process \d+\) died", message), message


@pytest.mark.parallel
def test_kernels_without_host_memory_crash(tmp_path):
    """Registers keras_ddl's kernels without host memory: the software GPU notices that they read device memory."""

    def reduce():
        from keras_ddl import communicator, ops
        from keras_ddl.compat.tensorflow import tf

        communicator.init()
        ops.all_reduce(tf.constant(1.0) + 1.0)

    code = 'extern "C" void TF_KernelBuilder_HostMemory(void*, const char*) {}'
    forgetful = compiled(code, tmp_path / "forgetful.so")
    outcome = on_software_gpus(reduce, 2, stream="none", LD_PRELOAD=str(forgetful))
    assert outcome.returncode != 0
    assert "Segmentation fault" in "".join(each.stderr for each in outcome.ranks), outcome.text()


@pytest.mark.long
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
        return chosen, visible, growth, [str(each.message) for each in caught], device.path_of_tensors()

    ranks = [each.result for each in on_software_gpus(choose, 3).check().ranks]
    assert [each[:3] for each in ranks] == [
        ("/device:GPU:0", [0], [True, None]),
        ("/device:GPU:1", [0, 1], [None, None]),
        ("/device:GPU:0", [0, 1], [None, None]),
    ]
    assert {each[4].partition(", because ")[2] for each in ranks} == {
        "TensorFlow had started on rank 1, with several GPUs"
    }
    (shares,), (starts,), (does_both,) = (each[3] for each in ranks)
    assert "Ranks 0, 2 share a GPU" in shares and "each takes memory as it needs it" in shares
    assert "Rank 1 computes on GPU 1, but takes memory on all 2" in starts
    assert "TensorFlow had started" in does_both


def test_info_lists_gpus_with_their_ranks(tmp_path):
    shown = run(["info"], tmp_path, env=software_gpu.environment())
    assert "GPU 1        SOFTWARE_GPU: local rank 1 computes on it\n  TensorFlow   sees 2" in shown.out, shown
    assert "collectives  take tensors on GPUs (by software_gpu-" in shown.out, shown


@pytest.mark.long
@pytest.mark.parallel
def test_doctor_says_how_collectives_take_tensors():
    def examine():
        from keras_ddl.doctor import ranks

        return [each.found for each in ranks.everything(".")[0] if each.subject == "tensors on GPUs"]

    (found,) = on_software_gpus(examine, 2, stream="auto").check().ranks[0].result
    assert found.endswith("to the host for collectives, because the installed TensorFlow is not a CUDA build"), found
