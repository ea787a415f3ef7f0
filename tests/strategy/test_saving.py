"""The record of saved files disappears when the ranks end, even if they are killed."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_ddl.errors import ConfigError
from keras_ddl.strategy.saving.save_records import Call, SaveRecords


def save_and_wait(job: str, folder: str, saved: "multiprocessing.synchronize.Event") -> None:
    records = SaveRecords(job, 0)
    with records.claim(f"{folder}/model", Call("call", 0)):
        Path(folder, "model").touch()
    saved.set()
    signal.pause()


@pytest.fixture
def records_of_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that keeps records in the temporary directory, `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("KERAS_DDL_RUN_DIR", raising=False)
    context = multiprocessing.get_context("fork")
    saved = context.Event()
    process = context.Process(target=save_and_wait, args=("other", str(tmp_path), saved))
    process.start()
    assert saved.wait(60)
    yield process
    process.kill()
    process.join()


def records_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("keras_ddl-saves-*")]


def test_records_of_a_killed_job_are_removed_and_others_stay(records_of_another_job, tmp_path: Path) -> None:
    SaveRecords("mine", 0)
    assert records_in(tmp_path) == ["keras_ddl-saves-other"]
    records_of_another_job.kill()
    records_of_another_job.join()
    assert records_in(tmp_path) == ["keras_ddl-saves-other"]
    SaveRecords("mine", 0)
    assert records_in(tmp_path) == []


def test_records_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("KERAS_DDL_RUN_DIR", raising=False)
    os.mkfifo(tmp_path / "keras_ddl-saves-fifo")
    (tmp_path / "keras_ddl-saves-link").symlink_to(tmp_path)
    (tmp_path / "keras_ddl-saves-file").touch()
    with time_limit(60):  # opening the FIFO would block forever
        SaveRecords("mine", 0)
    assert sorted(records_in(tmp_path)) == [f"keras_ddl-saves-{kind}" for kind in ("fifo", "file", "link")]
    if os.geteuid() == 0:
        (tmp_path / "keras_ddl-saves-nobody").mkdir()
        os.chown(tmp_path / "keras_ddl-saves-nobody", 65534, 65534)
        SaveRecords("mine", 0)
        assert "keras_ddl-saves-nobody" in records_in(tmp_path)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("."), Path.touch], ids=["fifo", "link", "file"]
)
def test_records_refuse_a_path_that_is_not_their_own_directory(make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("KERAS_DDL_RUN_DIR", raising=False)
    records = SaveRecords("mine", 0)
    make(records.folder)
    with (
        time_limit(60),
        pytest.raises(ConfigError, match="set TMPDIR"),
        records.claim(f"{tmp_path}/model", Call("call", 0)),
    ):
        pass


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("scheme", ["", "file://"])  # TensorFlow treats other schemes, such as gs://, likewise
def test_file_is_written_once_and_the_last_rank_removes_records(scheme: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", str(tmp_path / "rank-0"))
    ranks = [SaveRecords("mine", rank) for rank in range(2)]
    written = []
    for rank in ranks:
        with rank.claim(f"{scheme}{tmp_path}/model", Call("call", 0)) as mine:
            (tmp_path / "model").touch()
            written.append(mine)
    assert written == [True, False]
    ranks[0]._leave(os.getpid())
    assert records_in(tmp_path) == ["keras_ddl-saves-mine"]
    ranks[1]._leave(os.getpid() + 1)  # a forked child
    assert records_in(tmp_path) == ["keras_ddl-saves-mine"]
    ranks[1]._leave(os.getpid())
    assert records_in(tmp_path) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_changes_made_only_on_rank_0_are_kept(order: tuple[int, int], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", str(tmp_path / "rank-0"))
    ranks, path, writers = [SaveRecords("mine", rank) for rank in range(2)], tmp_path / "model", []

    def save(rank: int, weights: int, agreed: int, times: int) -> None:
        with ranks[rank].claim(str(path), Call("save", weights, weights, agreed, times)) as mine:
            if mine:
                path.write_text(str(weights))
                writers.append(rank)

    for rank in order:  # all have 7, and only rank 0 changes it to 8
        is_late = rank == 1 and order[0] == 0
        with pytest.warns(match="which differ from those of rank") if is_late else contextlib.nullcontext():
            save(rank, 8 if rank == 0 else 7, agreed=7, times=1)
    assert (path.read_text(), writers) == ("8", [0] if order[0] == 0 else [1, 0])
    save(0, 8, agreed=8, times=2)  # rank 0 saves its own change, then all ranks save a common one
    for rank in order:
        save(rank, 9, agreed=8, times=2)
        assert path.read_text() == "9", "a rank that has changed its weights writes"
    for each in ranks:
        each._leave(os.getpid())
