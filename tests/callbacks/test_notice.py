"""Signals that announce the end of a job: a checkpoint is saved, the status is 75, and a new run resumes."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from keras_ddl import checkpoint as ckpt
from keras_ddl.callbacks import Checkpoint
from keras_ddl.errors import ConfigError
from launch.launching import Started, environment, run

HERE = Path(__file__).parent
PROGRAM = HERE / "noticed_training.py"


def command(folder: Path, name: str, rank: int, step: int, *options: str) -> tuple[list[str], dict[str, str]]:
    paths = os.pathsep.join([str(HERE.parent), environment("", folder, None)["PYTHONPATH"]])
    program = ["python", str(PROGRAM), str(folder), name, str(rank), str(step)]
    return ["run", "-np", "3", *options, *program], {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "2"}


def end_of(folder: Path) -> list[np.ndarray]:
    return list(np.load(folder / "end.npz").values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[np.ndarray]:
    folder = tmp_path_factory.mktemp("whole")
    arguments, env = command(folder, "none", 0, 0)
    ended = run(arguments, folder, env=env)
    assert ended.status == 0, ended
    return end_of(folder)


def assert_equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for mine, one in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, one)


@pytest.mark.long
@pytest.mark.parametrize(("name", "rank", "step"), [("SIGTERM", 1, 6), ("SIGUSR1", 0, 9), ("SIGTERM", 2, 3)])
def test_notice_to_one_rank_is_followed_by_a_restart_from_its_checkpoint(name, rank, step, tmp_path, undisturbed):
    arguments, env = command(tmp_path, name, rank, step, "--restarts", "1")
    ended = run(arguments, tmp_path, env=env)
    assert ended.status == 0, ended
    assert f"Checkpoint: {name} on rank {rank}: saved, and this run ends with status 75." in ended.out, ended
    assert "restart 1 of 1, with 3 ranks (the ranks ended with status 75)" in ended.err, ended
    assert "Traceback" not in ended.err, ended
    assert_equal(end_of(tmp_path), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(("number", "options"), [(signal.SIGTERM, ["--grace", "60"]), (signal.SIGUSR1, [])])
def test_notice_to_the_launcher_saves_and_ends_with_status_75(number, options, tmp_path, undisturbed):
    arguments, env = command(tmp_path, "SIGUSR2", -1, 2, *options)  # no rank sends it
    started = Started(arguments, tmp_path, env=env)
    started.wait_for(tmp_path / "up-0")
    started.process.send_signal(number)
    ended = started.finish()
    assert ended.status == 75, ended
    (found,) = ckpt.list_checkpoints(tmp_path / "ckpt")
    assert found.problem is None
    assert ended.err.splitlines()[-1].startswith(f"keras-ddl: The last checkpoint is {found.path}. To continue"), ended
    ended = run(arguments, tmp_path, env=env | {"KERAS_DDL_RESTART": ""})
    assert ended.status == 0, ended
    assert_equal(end_of(tmp_path), undisturbed)


@pytest.mark.parametrize("names", ["SIGKILL", ("SIGTERM", "SIGNONSENSE"), ("TERM",), (15,)])
def test_notice_by_invalid_signals_is_refused(names, tmp_path):
    with pytest.raises(ConfigError, match="on_signal must be names of signals"):
        Checkpoint(tmp_path, on_signal=names)


def test_notice_outside_the_main_thread_is_an_error(tmp_path):
    notice, found = Checkpoint(tmp_path, on_signal="SIGTERM")._notice, []

    def begin():
        with pytest.raises(ConfigError, match="on_signal needs a fit in the main thread"):
            notice.begin()
        found.append(True)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found


def test_ignored_notice_falls_back_to_the_earlier_handler(tmp_path):
    notice, before, heard = Checkpoint(tmp_path, on_signal="SIGUSR1")._notice, signal.getsignal(signal.SIGUSR1), []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(True))
    try:
        notice.begin()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert notice.agreed() == ("SIGUSR1", 0) and not heard
        notice._received_at -= 60
        signal.raise_signal(signal.SIGUSR1)
        assert heard
        notice.begin()
        notice.end()
        signal.raise_signal(signal.SIGUSR1)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
