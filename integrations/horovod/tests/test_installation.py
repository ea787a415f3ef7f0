"""Unchanged imports of horovod find keras_ddl: after install(), and under `keras-ddl run --as-horovod`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.launching import python_path
from harness.name_tables import WORKS, row
from launch.launching import run

SCRIPT = """
import horovod
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras_ddl.horovod.installation import explain

hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
# The first DistributedOptimizer of the process: Python looks up compile before it is created.
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", experimental_run_tf_function=False)
assert model.jit_compile is False
total = hvd.allreduce(tf.constant([1.0, 2.0]) * (hvd.rank() + 1), op=hvd.Sum)
# Names of Keras 2: they work, or the error says what to use.
adam = keras.optimizers.Adam(0.5)
adam.build(model.variables)
hvd.broadcast_variables(adam.variables(), root_rank=0)
assert len(adam.variables()) == len(adam.variables) == 6
adam.lr = 0.25
assert float(keras.backend.get_value(adam.learning_rate)) == float(adam.lr) == 0.25
for owner, name, instead in ((tf, "ConfigProto", "tf.compat.v1.ConfigProto"), (model, "fit_generator", "model.fit,")):
    try:
        getattr(owner, name)
    except AttributeError as error:
        explain(error)
        assert name in str(error) and instead in str(error) and "horovod/docs/from-horovod.md" in str(error), error
if hvd.rank() == 0:
    print("total", total.numpy().tolist(), horovod.__version__)
"""


def python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def other_horovod(folder: Path) -> None:
    (folder / "horovod").mkdir()
    (folder / "horovod" / "__init__.py").write_text("__version__ = '0.28.1'\n")


def test_install_leads_imports_to_keras_ddl(tmp_path: Path) -> None:
    code = """
import sys
import keras_ddl.horovod
for _ in range(2):
    keras_ddl.horovod.install()
import horovod
import horovod.tensorflow as hvd
from horovod.tensorflow import rank
assert hvd is keras_ddl.horovod is horovod.tensorflow
assert hvd.__spec__.name == hvd.__name__ == "keras_ddl.horovod"
absent = {"horovod.torch": "keras_ddl.torch", "horovod.spark.common": "keras-ddl run"}
absent["horovod.nothing"] = "alternatives"
absent["horovod.tensorflow.data.compute_service"] = "tf.data.experimental.service"
for name, instead in absent.items():
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert str(error).startswith("keras_ddl does not replace horovod.") and instead in str(error), error
        assert "horovod.tensorflow.keras" in str(error) and "horovod/docs/from-horovod.md" in str(error), error
    else:
        raise AssertionError(name)
from horovod.tensorflow.mpi_ops import Average, size
from horovod.tensorflow.functions import broadcast_variables
assert hvd.size is size and hvd.broadcast_variables is broadcast_variables
from horovod.tensorflow.compression import Compression
assert Compression is hvd.Compression
from horovod.tensorflow import elastic
from horovod.common.exceptions import HorovodInternalError
import horovod.tensorflow.keras.elastic, horovod.common.elastic
assert hvd.elastic is elastic is horovod.tensorflow.elastic and HorovodInternalError is elastic.HorovodInternalError
assert horovod.common.elastic.ObjectState is elastic.ObjectState
assert horovod.tensorflow.keras.elastic.run is elastic.run and horovod.tensorflow.keras.elastic.KerasState
print("done")
"""
    assert python(code, tmp_path) == "done\n"


def test_install_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, keras_ddl.horovod as hvd; hvd.install(); import horovod.tensorflow; dir(hvd)"
    code += "; heavy = {'tensorflow', 'keras', 'mpi4py'} & set(sys.modules); assert not heavy, heavy"
    python(code, tmp_path)


def test_install_refuses_if_another_horovod_is_installed(tmp_path: Path) -> None:
    other_horovod(tmp_path)
    code = """
import sys
from keras_ddl.errors import ConfigError
from keras_ddl.horovod.installation import FOLDER, install
for before in ("", "import horovod", f"sys.path.insert(0, {str(FOLDER)!r})"):
    exec(before)
    try:
        install()
    except ConfigError as error:
        assert "horovod/__init__.py" in str(error) and "pip uninstall" in str(error), error
    else:
        raise AssertionError(before)
    sys.modules.pop("horovod", None)
print("refused")
"""
    assert python(code, tmp_path) == "refused\n"


@pytest.mark.parallel
def test_run_as_horovod_runs_an_unchanged_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "horovod").mkdir()  # a folder of that name beside the script is not Horovod
    ended = run(["run", "-np", "2", "--as-horovod", "python", "train.py"], tmp_path)
    assert ended.status == 0, ended
    assert "total [3.0, 6.0] 0.28.1+keras.ddl" in ended.out, ended


@row(
    "horovod.run",
    WORKS,
    "`use_mpi`, `start_timeout` and `disable_cache` do nothing; arguments without a counterpart (`use_gloo`, "
    "`ssh_port`, `min_num_proc`, ...) are an error",
    by_keyword="min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile host_discovery_script "
    "start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args "
    "network_interface network_interfaces executable np min_np max_np",
)
@row("horovod.__version__", WORKS)
@pytest.mark.parallel
def test_horovod_run_calls_a_function_whose_imports_find_keras_ddl(tmp_path: Path) -> None:
    code = """
import keras_ddl.horovod
keras_ddl.horovod.install()
import horovod
import keras_ddl

def work(a, b=0):
    import horovod.tensorflow as hvd
    import keras_ddl
    keras_ddl.init()
    return hvd.__name__, keras_ddl.rank(), a + b

results = horovod.run(work, (3,), {"b": 4}, num_proc=2, use_mpi=True)
assert results == [("keras_ddl.horovod", 0, 7), ("keras_ddl.horovod", 1, 7)], results
assert horovod.__version__ == "0.28.1+keras.ddl"
absent = "min_num_proc max_num_proc slots reset_limit cooldown_range host_discovery_script ssh_port ssh_identity_file"
absent += " output_filename use_gloo mpi_args network_interface network_interfaces min_np max_np executable"
for wrong in (*({name: "x"} for name in absent.split()), {"hosts": "a:1", "hostfile": "x"}):
    try:
        keras_ddl.horovod.run(work, (3,), **wrong)
    except ValueError as error:
        assert next(iter(wrong)) in str(error)
    else:
        raise AssertionError(wrong)
print("done")
"""
    assert python(code, tmp_path).endswith("done\n")


def test_run_as_horovod_refuses_if_another_horovod_is_installed(tmp_path: Path) -> None:
    other_horovod(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"PYTHONPATH": python_path(tmp_path)}
    ended = run(["run", "-np", "2", "--as-horovod", "python", "train.py"], tmp_path, env=env)
    assert ended.status == 2, ended
    assert "only if Horovod is not installed" in ended.err, ended
