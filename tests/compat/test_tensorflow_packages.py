"""Errors in environments that keras_ddl does not support. No test imports TensorFlow in this process."""

import os
import subprocess
import sys
import types

import pytest

from keras_ddl.compat import tensorflow_packages
from keras_ddl.errors import DependencyError


def install(folder, name: str, version: str, content: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{path},sha256={content},1000" for path in tensorflow_packages._LIBRARIES] if content else []
    (info / "RECORD").write_text("\n".join(["tensorflow/__init__.py,sha256=x,10", *lines]) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(("version", "content"), [("2.21.0", "gpu"), ("2.20.0", "old")])
def test_two_tensorflows_that_differ_are_refused(site, version, content):
    install(site, "tensorflow-cpu", "2.21.0", "cpu")
    install(site, "tensorflow", version, content)
    with pytest.raises(DependencyError) as caught:
        tensorflow_packages.check_one_tensorflow()
    text = str(caught.value)
    assert f"tensorflow {version} and tensorflow-cpu 2.21.0" in text
    assert "pip uninstall -y tensorflow tensorflow-cpu && " in text
    assert text.endswith("pip install '.[tensorflow-cpu]'")  # keras_ddl's metadata is missing here


@pytest.mark.parametrize(
    "packages",
    [
        [],
        [("tensorflow-cpu", "cpu")],
        [("tensorflow", "same"), ("tensorflow-cpu", "same")],
        [("tensorflow", ""), ("tensorflow-cpu-aws", "cpu")],  # `tensorflow` may be only a dependency on it
    ],
)
def test_one_tensorflow_is_accepted(site, packages):
    for name, content in packages:
        install(site, name, "2.21.0", content)
    tensorflow_packages.check_one_tensorflow()


@pytest.mark.parametrize("version", ["2.16.1", "2.22.0-rc1", "2.30.1"])
def test_check_version_accepts_supported_versions(version):
    assert tensorflow_packages.check_version(version, (2, 16)) == tuple(int(word) for word in version.split(".")[:2])


@pytest.mark.parametrize("version", ["2.15.1", "3.0.0"])
def test_check_version_names_what_to_install(version):
    with pytest.raises(
        DependencyError, match=rf"2\.16 or newer, below 3\.0.*TensorFlow {version}.*'tensorflow-cpu>=2.19,<2.22'"
    ):
        tensorflow_packages.check_version(version, (2, 16))


def test_check_keras_backend_reads_the_environment(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    for accepted in ("", "tensorflow"):
        monkeypatch.setenv("KERAS_BACKEND", accepted)
        tensorflow_packages.check_keras_backend()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(DependencyError, match="KERAS_BACKEND = 'jax'.*KERAS_BACKEND=tensorflow"):
        tensorflow_packages.check_keras_backend()


def test_check_keras_backend_names_the_alternatives_on_torch():
    code = (
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"
        "import keras_ddl, keras_ddl.communicator\n"
        "try:\n"
        "    keras_ddl.Strategy\n"
        "except ImportError as error:\n"
        "    assert \"init_process_group('ddl')\" in str(error) and 'DataParallel' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "KERAS_BACKEND": "torch"}, timeout=300)


def test_check_keras_backend_reads_the_keras_that_is_imported(monkeypatch):
    keras = types.SimpleNamespace(config=types.SimpleNamespace(backend=lambda: "torch"))
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(DependencyError, match="imported with backend 'torch'"):
        tensorflow_packages.check_keras_backend()


BLOCK = "import sys; sys.modules['tensorflow'] = None; import keras_ddl; keras_ddl.all_reduce"
BREAK = """
import sys, importlib.abc, keras_ddl
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *rest):
        if name == 'tensorflow':
            raise ImportError('libxyz.so.1: cannot open shared object file', name='tensorflow.libs')
sys.meta_path.insert(0, Broken())
keras_ddl.all_reduce
"""


# Imports the package before removing one of its private modules, so its public part stays intact.
WITHOUT = """
import sys, {package}; sys.modules[{module!r}] = None
import keras_ddl; keras_ddl.Strategy
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param(
            WITHOUT.format(package="keras", module="keras.src.trainers.data_adapters.array_data_adapter"),
            ["works with keras 3.13 to 3.15. Received: keras 3.", "array_data_adapter", "'keras>=3.13,<3.16'"],
            marks=pytest.mark.long,
            id="private keras",
        ),
        pytest.param(
            WITHOUT.format(package="tensorflow", module="tensorflow.python.distribute.distribute_lib"),
            ["works with tensorflow 2.16 to 2.21. Received: tensorflow 2.", "'tensorflow-cpu>=2.19,<2.22'"],
            marks=pytest.mark.long,
            id="private tensorflow",
        ),
        pytest.param(BLOCK, ["no TensorFlow in", "pip install 'tensorflow-cpu>=2.19,<2.22'"], id="missing"),
        pytest.param(BREAK, ["cannot be imported", "libxyz.so.1"], id="broken"),
    ],
)
def test_first_use_of_tensorflow_reports_the_problem(program, words, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("keras_ddl.errors.DependencyError"), done.stderr
    for word in words:
        assert word in last


@pytest.mark.long
def test_tensorflow_is_imported_without_keras_until_keras_is_used():
    program = (
        "import sys\n"
        "from keras_ddl.compat.tensorflow_packages import import_without_keras\n"
        "import_without_keras()\n"
        "assert 'tensorflow' in sys.modules and 'keras' not in sys.modules, sorted(sys.modules)\n"
        "import_without_keras()\n"
        "import keras, tensorflow\n"
        "assert tensorflow.keras.layers.Dense is keras.layers.Dense\n"
        "assert tensorflow.keras.layers.Dense(1)(tensorflow.ones([2, 3])).shape == (2, 1)\n"
        "from tensorflow.keras.layers import Dense\n"
        "assert Dense is keras.layers.Dense\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
