"""Stand-ins for callbacks that write can take over at the current point of training (keras_patches/standby.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
from keras.src.callbacks import remote_monitor

from keras_ddl.communicator import first_rank
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.keras_patches import model_saves, standby
from keras_ddl.strategy.keras_patches.progress import JobBar
from keras_ddl.strategy.saving import writers


class Finished:
    """Counts the calls that all ranks have finished."""

    number = 0

    def __call__(self) -> int:
        return self.number


class Writer(keras.callbacks.Callback):
    """A callback of another package that writers.py classifies as a mere writer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def set_model(self, model: Any) -> None:
        self.seen.append("model")

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append("train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(("epoch", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(("end", epoch, logs))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("batch", batch, logs))


@pytest.fixture(autouse=True)
def register_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_OTHER_WRITERS", {f"{Writer.__module__}.{Writer.__qualname__}"})


def silenced(callback: Any, finished: Finished) -> standby.StandIn:
    stand_in = standby.silence(callback, finished)
    assert stand_in is not None
    return stand_in


def calls_after_takeover(stand_in: standby.StandIn, **options: bool) -> list[Any]:
    stand_in.become_writer({}, **options)
    seen: list[Any] = stand_in.writer.seen
    return seen


def trained(stand_in: standby.StandIn, finished: Finished) -> standby.StandIn:
    """Trains up to the end of the first batch of the second epoch; only its last call may be unfinished elsewhere."""
    writer = stand_in.writer
    writer.on_train_begin({})
    finished.number += 1
    for epoch in (0, 1):
        writer.on_epoch_begin(epoch, {})
        finished.number += 1
        writer.on_train_batch_begin(0, logs={})
        finished.number += 1
        writer.on_train_batch_end(0, logs={"loss": epoch})
        if epoch == 0:
            writer.on_epoch_end(epoch, {"loss": epoch})
            finished.number += 1
    return stand_in


@pytest.mark.parametrize(
    ("further", "may_lack_last", "expected"),
    [
        (0, True, ["model", "train", ("epoch", 1), ("batch", 0, {"loss": 1})]),
        (0, False, ["model", "train", ("epoch", 1)]),
        (1, True, ["model", "train", ("epoch", 1)]),  # all ranks have finished that call
    ],
)
def test_writer_receives_open_calls_and_possibly_lost_ones(further: int, may_lack_last: bool, expected: Any) -> None:
    finished = Finished()
    stand_in = trained(silenced(Writer(), finished), finished)
    finished.number += further
    assert calls_after_takeover(stand_in, may_lack_last=may_lack_last, has_begun=True) == expected


def test_writer_starts_before_training_and_not_after_its_end() -> None:
    finished = Finished()
    stand_in = silenced(Writer(), finished)
    stand_in.writer.on_train_begin({})
    finished.number += 1
    assert calls_after_takeover(stand_in, may_lack_last=True, has_begun=False) == ["model", "train"]
    stand_in = trained(silenced(Writer(), finished), finished)
    stand_in.writer.on_epoch_end(1, {})
    stand_in.writer.on_train_end({})
    finished.number += 1
    assert calls_after_takeover(stand_in, may_lack_last=True, has_begun=True) == []


@pytest.mark.parametrize("written", [b"", b"a,b\r\n1", b"a,b\r\n1,2\r\n3,4\r\n5,6\r\n", b"else\r\n"])
@pytest.mark.parametrize("before", [b"", b"an earlier run\r\n"])
def test_file_is_corrected_to_the_expected_rows(before: bytes, written: bytes, tmp_path: Path) -> None:
    path, text = tmp_path / "log.csv", b"a,b\r\n1,2\r\n3,4\r\n"
    path.write_bytes(before + written)
    standby._make_equal(str(path), len(before), text)
    assert path.read_bytes() == before + text


@pytest.mark.parametrize("append", [False, True])
def test_csv_logger_continues_its_rows(append: bool, tmp_path: Path) -> None:
    path, finished = tmp_path / "log.csv", Finished()
    path.write_bytes(b"epoch,loss,val_loss\r\n7,0.5,NA\r\n" if append else b"another\r\n")
    writer = keras.callbacks.CSVLogger(path, append=append)
    stand_in = silenced(writer, finished)
    before = path.read_bytes() if append else b""
    writer.on_train_begin({})
    writer.on_epoch_end(0, {"loss": 0.25})
    if not append:
        path.write_bytes(b"epoch,loss,val_loss\r\n0,0.2")  # killed in the middle of the line
    stand_in.become_writer({}, may_lack_last=True, has_begun=True)
    writer.on_epoch_end(1, {"loss": 0.125})
    writer.on_train_end({})
    header = b"" if append else b"epoch,loss,val_loss\r\n"
    assert path.read_bytes() == before + header + b"0,0.25,NA\r\n1,0.125,NA\r\n"


@pytest.mark.parametrize("may_lack_last", [True, False])
def test_subclass_of_a_writer_runs_and_writes_missing_output(may_lack_last: bool, tmp_path: Path) -> None:
    class Rates(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["rate"] = 0.5
            super().on_epoch_end(epoch, logs)

    class Monitor(keras.callbacks.RemoteMonitor):
        runs = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.runs += 1
            super().on_epoch_end(epoch, logs)

    finished, posted = Finished(), []
    rates, monitor = Rates(tmp_path / "log.csv"), Monitor()
    kept = {name: vars(kind).copy() for name, kind in vars(keras.callbacks).items() if isinstance(kind, type)}
    stand_ins = {each: silenced(each, finished) for each in (rates, monitor)}
    assert type(rates).__name__ == "Rates" and isinstance(rates, Rates)
    for each in (rates, monitor):
        each.on_train_begin({})
        for epoch in (0, 1):
            each.on_epoch_begin(epoch, {})
            finished.number += 1
            each.on_epoch_end(epoch, logs := {"loss": epoch})
            assert each is monitor or logs == {"loss": epoch, "rate": 0.5}
    assert not (tmp_path / "log.csv").exists() and monitor.runs == 2
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(remote_monitor.requests, "post", lambda url, sent, headers: posted.append(sent["data"]))
        for each in (rates, monitor):
            stand_ins[each].become_writer({}, may_lack_last=may_lack_last, has_begun=True)
        assert (type(rates), type(monitor)) == (Rates, Monitor)
        assert posted == ['{"epoch": 1, "loss": 1}'] * may_lack_last and monitor.runs == 2
        monitor.on_epoch_end(2, {"loss": 2})
        assert posted[-1] == '{"epoch": 2, "loss": 2}'
    rates.on_epoch_end(2, {"loss": 2})
    rates.on_train_end()
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert rows == ["epoch,loss,rate,val_loss,val_rate", *(f"{n},{n},0.5,NA,NA" for n in range(3))]
    assert {name: vars(getattr(keras.callbacks, name)).copy() for name in kept} == kept  # Keras's classes are unchanged


def test_tensorboard_continues_its_count(tmp_path: Path) -> None:
    finished = Finished()
    writer = keras.callbacks.TensorBoard(tmp_path, update_freq=1)
    stand_in = silenced(writer, finished)
    writer._write_keras_model_summary = lambda: pytest.fail("the lost rank has described the model")
    writer.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    trained(stand_in, finished)
    writer.on_train_batch_begin(1, logs={})
    finished.number += 1
    with writer._train_writer.as_default():
        tf.summary.scalar("of a program's class", 1.0, step=0)
    assert not list(tmp_path.rglob("events*"))
    stand_in.become_writer({}, may_lack_last=True, has_begun=True)
    assert (writer._global_train_batch, writer.write_graph) == (3, True)
    writer.on_train_batch_end(1, logs={"loss": 1.0})
    writer.on_train_end({})


def test_backups_are_due_on_all_ranks_and_restored_before_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, backup = Finished(), keras.callbacks.BackupAndRestore(tmp_path, save_freq=2)
    saved = []
    monkeypatch.setattr(backup, "_save_model", lambda: saved.append((backup._current_epoch, backup._last_batch_seen)))
    monkeypatch.setattr(backup, "_load_model", lambda: saved.append("restored"))
    stand_in = trained(silenced(backup, finished), finished)
    assert saved == [(1, 0)]  # after two batches in total
    stand_in.become_writer({}, may_lack_last=True, has_begun=True)
    assert saved == [(1, 0)]
    stand_in = silenced(backup, finished)
    backup.on_train_begin({})
    finished.number += 1
    stand_in.become_writer({}, may_lack_last=True, has_begun=False)
    assert saved == [(1, 0), "restored"]


def test_next_rank_deletes_the_backup(tmp_path: Path) -> None:
    finished, backup = Finished(), keras.callbacks.BackupAndRestore(tmp_path / "backup")
    backup._save_model = lambda: None
    stand_in = trained(silenced(backup, finished), finished)
    Path(backup.backup_dir).mkdir()
    backup.on_train_end({})
    assert Path(backup.backup_dir).exists()
    stand_in.become_writer({}, may_lack_last=True, has_begun=True)
    assert not Path(backup.backup_dir).exists()


def test_save_is_made_by_rank_0_or_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, written = iter([1, 1, 0, 0]), []  # the second save is repeated, when this rank has become rank 0
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="loss", save_best_only=True, mode="min"
    )
    checkpoint.set_model(SimpleNamespace(save=lambda path, **_: written.append(checkpoint.best)))
    checkpoint._set_monitor_op()
    model_saves.Saves(checkpoint).share()
    again = {2.0: False, 1.0: True, 1.5: False}
    monkeypatch.setattr(first_rank, "is_first_rank", lambda: next(ranks) == 0)
    for epoch, (loss, twice) in enumerate(again.items()):
        monkeypatch.setattr(history, "_recover", lambda call, _: [call(None) for _ in range(1 + twice)][-1])  # noqa: B023
        checkpoint._save_model(epoch=epoch, batch=None, logs={"loss": loss})
        assert checkpoint.best == min(2.0, loss, 1.0 if epoch else 2.0)
        assert written == [1.0] * (epoch > 0)


def test_bar_drawn_silently_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    finished, params = Finished(), {"verbose": 2, "epochs": 3, "steps": 1}
    bar = JobBar()
    bar._now = lambda: (0.0, 0)
    stand_in = silenced(bar, finished)
    bar.set_params({**params, "verbose": 0})
    trained(stand_in, finished)
    assert capsys.readouterr().out == ""
    stand_in.become_writer(params, may_lack_last=False, has_begun=True)
    bar.on_epoch_end(1, {"loss": 1.0})
    shown = capsys.readouterr().out
    assert shown.startswith("1/1 - ") and "loss: 1.0000" in shown and "Epoch" not in shown
