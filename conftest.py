"""Settings, hooks and fixtures for all tests."""

import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import side_by_side
from harness.launching import MODULE_FOLDERS, TESTS
from harness.leftovers import leaked_shared_memory, shared_memory
from harness.long_tests import LongTests

sys.path.extend(str(folder) for folder in MODULE_FOLDERS if str(folder) not in sys.path)

# pytest imports the folders above a test file as packages. Without these, export/__init__.py would be the module
# `export`, too, a second time in addition to keras_ddl.export.
for _folder in MODULE_FOLDERS:
    if (_folder.parent / "__init__.py").exists():
        _name = ".".join(_folder.parent.relative_to(TESTS.parent).parts)
        sys.modules.setdefault(_name, types.ModuleType(_name)).__path__ = [str(_folder.parent)]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir:
    """Every folder is a folder: as a package, integrations/torch/__init__.py would be imported as `torch`."""
    return pytest.Dir.from_parent(parent, path=path)


# Every Python that tests start finds its sitecustomize.py there; so do xdist's workers, but pytest was started before.
START = str(TESTS / "harness" / "start")
if START not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), START]))
    importlib.import_module("harness.start.sitecustomize")

# A shell without job control starts background jobs with SIGINT ignored, and every process started here would inherit
# that: nothing could be interrupted, and what a test says about Ctrl-C would be about the shell.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    """Finds shared memory that jobs without the harness left behind. Removes Open MPI's, and fails for our own."""
    before = shared_memory()
    yield
    assert leaked_shared_memory(before) == []


@pytest.fixture
def float64() -> Iterator[None]:
    """Makes Keras compute in float64, where rounding cannot hide a difference."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.fixture
def foreign_directory() -> Iterator[Path]:
    """A directory that this process may read and not write to; root, who may do anything, is another user meanwhile."""
    parent = Path(tempfile.mkdtemp())  # not tmp_path: other users may not enter pytest's directories
    parent.chmod(0o755)
    locked = parent / "locked"
    locked.mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield locked
    finally:
        os.seteuid(user)
        locked.chmod(0o755)
        shutil.rmtree(parent)


def pytest_configure(config: pytest.Config) -> None:
    """Watches long tests, and gives TensorFlow the threads that simulated ranks wait in, before any test starts it."""
    config.pluginmanager.register(LongTests(), "long tests")
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # xdist's controller runs no test
    try:
        import tensorflow as tf
    except ImportError:  # as for integrations/torch/tests alone
        return
    tf.config.threading.set_inter_op_parallelism_threads(32)


@pytest.hookimpl(optionalhook=True)  # also without the plug-in
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> side_by_side.Scheduler:
    return side_by_side.Scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return side_by_side.ORDINARY_AT_ONCE


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: otherwise every full collection goes through all of them
    gc.set_threshold(20_000)  # traces make objects by the thousand that stay as long as their graph


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    side_by_side.arrange(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    is_worker = hasattr(item.config, "workerinput")  # without others there is nobody to hold off for longer
    following = side_by_side.kind_of(nextitem) if is_worker and nextitem is not None else None
    with side_by_side.turn(side_by_side.kind_of(item), following):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --durations, also prints the time of single checks of a launch, which pytest counts as its first check."""
    most = config.getoption("durations")
    if most is None:
        return
    everything = [report for found in terminalreporter.stats.values() for report in found]
    reports = [report for report in everything if hasattr(report, "user_properties")]  # not warnings
    took = {report.nodeid: dict(report.user_properties).get("seconds", 0.0) for report in reports}
    terminalreporter.section("slowest checks on ranks")
    for name, seconds in sorted(took.items(), key=lambda item: -item[1])[: most or None]:
        if seconds > 0:
            terminalreporter.write_line(f"{seconds:.2f}s {name}")
