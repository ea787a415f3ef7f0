"""Checkpoint directories are complete or absent even if the writer is killed, and damage is reported clearly."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.writer_program import content
from keras_ddl import checkpoint
from keras_ddl.errors import CheckpointError
from keras_ddl.files import digests, durable, foreign

HERE = Path(__file__).parent
DATA = "weights.data-00000-of-00001"


def write(root: Path, step: int, **options: object) -> checkpoint.Checkpoint:
    def fill(folder: Path) -> None:
        (folder / "weights.index").write_bytes(content(step)[:500])
        (folder / "weights.data-00000-of-00001").write_bytes(content(step))

    return checkpoint.write(root, step, fill, **options)


def test_writer_killed_at_random_moments_leaves_a_whole_latest_checkpoint(tmp_path: Path) -> None:
    random.seed(4)
    last = reads = 0
    left_behind = 0
    for turn in range(10):
        writer = subprocess.Popen(
            [sys.executable, "-P", HERE / "writer_program.py", tmp_path, str(last + 1)],
            stdout=subprocess.PIPE,
        )
        writer.stdout.readline()  # at least one checkpoint
        end = time.monotonic() + random.uniform(0.0, 0.06)
        while time.monotonic() < end:
            assert checkpoint.list_checkpoints(tmp_path)[-1].step >= last
            reads += 1
        if turn % 2:  # half of the kills strike while something is being written or removed
            while not any(entry.name.startswith(".tmp-") for entry in tmp_path.iterdir()):
                pass
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = checkpoint.latest(tmp_path)
        checkpoint.validate(found)
        assert found.step > last
        assert (found.path / "weights.data-00000-of-00001").read_bytes() == content(found.step)
        assert found.epoch == found.step and found.metrics == {"loss": 1 / found.step}
        assert all(each.problem is None for each in checkpoint.list_checkpoints(tmp_path))
        last = found.step
        left_behind += any(entry.name.startswith(".tmp-") for entry in tmp_path.iterdir())
        checkpoint.sweep_temporaries(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("ckpt-")] == []
        assert not [entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".replaced")]
    assert reads > 10
    assert left_behind >= 2, "no kill struck during a write, so the test proves nothing"


def test_checkpoint_is_synced_before_and_after_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, Path.rename

    def noting_sync(descriptor: int) -> None:
        done.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def noting_rename(path: Path, target: Path) -> Path:
        done.append(("rename", path))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noting_sync)
        patch.setattr(Path, "rename", noting_rename)
        final = write(tmp_path, 1).path
    (renamed,) = [place for place, (what, _) in enumerate(done) if what == "rename"]
    staged = done[renamed][1]
    files = {staged / each.relative_to(final) for each in final.iterdir()}
    assert len(files) == 3 and {path for _, path in done[:renamed]} >= {staged, *files}
    assert ("sync", tmp_path) in done[renamed:]


def test_replaced_checkpoint_stands_in_until_the_new_one_is_there(tmp_path: Path) -> None:
    write(tmp_path, 5, epoch=1)
    (tmp_path / "ckpt-00000005").rename(tmp_path / "ckpt-00000005.replaced")  # as after a kill between the renames
    assert checkpoint.latest(tmp_path).epoch == 1
    checkpoint.sweep_temporaries(tmp_path)
    assert checkpoint.latest(tmp_path).path.name == "ckpt-00000005"
    assert write(tmp_path, 5, epoch=2).epoch == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt-00000005"]


def test_sweep_spares_the_temporaries_of_live_writers(tmp_path: Path) -> None:
    tmp_path.joinpath(".tmp-elsewhere-1-abcd").mkdir()
    with durable.staging_directory(tmp_path) as mine:
        dead = mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-4194305-"))
        dead.mkdir()
        assert checkpoint.sweep_temporaries(tmp_path) == [dead.name]
        assert mine.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == [".tmp-elsewhere-1-abcd"]


def test_best_follows_metric_and_mode(tmp_path: Path) -> None:
    for step, loss, accuracy in ((1, 0.9, 0.5), (2, 0.3, 0.7), (3, float("nan"), 0.9), (4, 0.3, 0.6)):
        metrics = {"val_loss": loss, "val_accuracy": accuracy}
        write(tmp_path, step, metrics=metrics, monitor="val_loss")
    write(tmp_path, 5)
    assert checkpoint.best(tmp_path).step == 4, "the later of equals; NaN is never best"
    assert checkpoint.best(tmp_path, "val_accuracy").step == 3, "auto: accuracy is better when higher"
    assert checkpoint.best(tmp_path, "val_accuracy", "min").step == 1
    assert checkpoint.latest(tmp_path).step == 5
    assert checkpoint.find(tmp_path, "2").step == checkpoint.find(tmp_path, 2).step == 2
    assert checkpoint.prune(tmp_path, 1, ("val_loss", "min")) == [1, 2, 3]
    assert [each.step for each in checkpoint.list_checkpoints(tmp_path)] == [4, 5]


def test_prune_does_not_count_damaged_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        damaged = write(tmp_path, step).path
    (damaged / "state.json").unlink()
    assert checkpoint.prune(tmp_path, 2) == []
    write(tmp_path, 4)
    assert checkpoint.prune(tmp_path, 2) == [1, 3]


def test_prune_keeps_a_checkpoint_that_is_being_read(tmp_path: Path) -> None:
    first = write(tmp_path, 1).path
    write(tmp_path, 2)
    with durable.being_read(first), durable.being_read(first):
        assert checkpoint.prune(tmp_path, 1) == []
    assert checkpoint.prune(tmp_path, 1) == [1]


def test_prune_takes_a_checkpoint_off_the_list_before_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)

    def killed(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(durable.shutil, "rmtree", killed)
        checkpoint.prune(tmp_path, 1)
    assert [each.step for each in checkpoint.list_checkpoints(tmp_path)] == [2]


@pytest.mark.parametrize(
    ("metric", "mode"), [("val_acc", "max"), ("mae", "min"), ("val_auc_2", "max"), ("val_accel_loss", "min")]
)
def test_resolve_mode_knows_common_names(metric: str, mode: str) -> None:
    assert checkpoint.resolve_mode(metric) == mode


@pytest.mark.parametrize("metric", ["val_dice", "inaccuracy", "score"])
def test_resolve_mode_asks_for_unknown_names(metric: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"Received: '{metric}'.*mode='min' or mode='max'"):
        checkpoint.resolve_mode(metric)
    write(tmp_path, 1, metrics={metric: 1.0})
    with pytest.raises(CheckpointError, match="mode='min' or mode='max'"):
        checkpoint.best(tmp_path, metric)
    assert checkpoint.best(tmp_path, metric, "max").step == 1


def test_set_aside_moves_an_earlier_run_even_after_a_kill(tmp_path: Path) -> None:
    assert checkpoint.set_aside(tmp_path / "absent") is None
    (tmp_path / "base").mkdir()
    assert checkpoint.set_aside(tmp_path) is None
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "previous-1.moving").mkdir()  # as after a kill between moving two checkpoints
    (tmp_path / "ckpt-00000001").rename(tmp_path / "previous-1.moving" / "ckpt-00000001")
    moved = checkpoint.set_aside(tmp_path)
    assert moved == tmp_path / "previous-1"
    assert sorted(entry.name for entry in moved.iterdir()) == ["base", "ckpt-00000001", "ckpt-00000002"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["previous-1"]
    write(tmp_path, 1)
    assert checkpoint.set_aside(tmp_path) == tmp_path / "previous-2"


@pytest.mark.parametrize(
    ("file", "damaged", "words"),
    [
        (DATA, lambda held: held[:-100], r"weights\.data-00000-of-00001 has 20191 of 20291 bytes \(truncated"),
        ("weights.index", lambda held: held + b"more", r"weights\.index has 504 of 500 bytes"),
        ("weights.index", None, r"weights\.index is missing"),
        ("state.json", None, r"state\.json is missing"),
        ("state.json", lambda held: held.replace(b'"step": 3', b'"step": 9'), r"state\.json was altered"),
        ("state.json", lambda held: held[:50], r"state\.json cannot be read"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, file: str, damaged: Callable[[bytes], bytes] | None, words: str
) -> None:
    write(tmp_path, 2)
    path = write(tmp_path, 3).path / file
    held = path.read_bytes()
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged(held))
    with pytest.raises(CheckpointError, match=rf"complete.*ckpt-00000003.*{words}.*earlier step \(2 look complete\)"):
        checkpoint.latest(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.find(tmp_path, 3)
    assert checkpoint.find(tmp_path, 2).step == 2
    assert checkpoint.best(write(tmp_path, 2, metrics={"loss": 1.0}).path.parent, "loss").step == 2
    assert checkpoint.prune(tmp_path, 1) == [], "the newest is never removed, even if damaged"


def test_altered_byte_is_found_by_reading(tmp_path: Path) -> None:
    found = write(tmp_path, 3)
    file = found.path / "weights.data-00000-of-00001"
    content = bytearray(file.read_bytes())
    content[777] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"weights\.data-00000-of-00001 was altered.*SHA-256.*no other checkpoint"
    ):
        checkpoint.validate(checkpoint.latest(tmp_path))


def test_errors_distinguish_absent_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must exist.*nothing there"):
        checkpoint.latest(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="must exist.*a file"):
        checkpoint.list_checkpoints(tmp_path / "file")
    with pytest.raises(CheckpointError, match="a file is in the way"):
        write(tmp_path / "file", 1)
    (tmp_path / ".tmp-host-1-abcd").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint \(holds: file\)"):
        checkpoint.latest(tmp_path)
    assert checkpoint.list_checkpoints(tmp_path) == []
    (tmp_path / "ckpt-00000007").mkdir()
    with pytest.raises(CheckpointError, match=r"one of these, .*ckpt-00000007.*--which STEP"):
        checkpoint.latest(tmp_path / "ckpt-00000007")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: checkpoint.find(folder, "newest"), "'latest', 'best' or a step. Received: 'newest'.*: 3"),
        (lambda folder: checkpoint.find(folder, 4), "must be a saved step. Received: 4. Steps in .*: 3"),
        (lambda folder: checkpoint.find(folder, "best"), r"metric='val_loss'.*\['loss'\]"),
        (lambda folder: checkpoint.prune(folder, 0), "1 or more. Received: keep=0"),
    ],
)
def test_errors_list_the_available_choices(tmp_path: Path, call: Callable[[Path], object], words: str) -> None:
    write(tmp_path, 3, metrics={"loss": 1.0})
    with pytest.raises(CheckpointError, match=words):
        call(tmp_path)


def test_unsupported_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one number. Received: loss=.1, 2."):
        write(tmp_path, 1, metrics={"loss": [1, 2]})
    with pytest.raises(CheckpointError, match="extra must be JSON values"):
        write(tmp_path, 1, extra={"layer": object()})
    assert list(tmp_path.iterdir()) == []


def test_directory_of_another_user_is_refused(foreign_directory: Path) -> None:
    with pytest.raises(CheckpointError, match="may write to.*locked.*owner or mode"):
        write(foreign_directory, 1)


def test_listing_is_repeated_if_all_checkpoints_are_pruned_meanwhile(tmp_path, monkeypatch):
    write(tmp_path, 1)
    is_dir, pruned = Path.is_dir, []

    def prune_first(path: Path) -> bool:
        if path.name.startswith("ckpt-") and not pruned:
            pruned.append(path)
            write(tmp_path, 2)
            shutil.rmtree(path)
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", prune_first)
    assert [each.step for each in checkpoint.list_checkpoints(tmp_path)] == [2]
    assert pruned


def test_invalid_entries_are_named_and_do_not_hide_others(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "ckpt-00000002").symlink_to("ckpt-00000002")
    for step, name in ((3, "state.json"), (4, "weights.index")):
        path = write(tmp_path, step).path / name
        path.unlink()
        os.mkfifo(path)  # opening it would wait for a writer
    for step, text in ((5, "[" * 100_000), (6, "[]"), (7, json.dumps(digests.sealed({"step": 7})))):
        (write(tmp_path, step).path / "state.json").write_text(text)
    whole = json.loads((tmp_path / "ckpt-00000001" / "state.json").read_text())
    whole |= {"step": 8, "files": {"../private": {"bytes": 1, "sha256": ""}}}
    del whole["sha256"]
    (write(tmp_path, 8).path / "state.json").write_text(json.dumps(digests.sealed(whole)))
    found = {each.step: each.problem or "" for each in checkpoint.list_checkpoints(tmp_path)}
    assert list(found) == list(range(1, 9))
    words = ["", "symbolic link", "json is a FIFO", "index is a FIFO", "levels", "altered", "lacks", "leads out"]
    assert [word in found[step] for step, word in enumerate(words, 1)] == [True] * 8, found
    assert checkpoint.find(tmp_path, 1).problem is None


@pytest.mark.parametrize("name", ["../private", "/etc/passwd", "inner/../../private", "link/private", ""])
def test_names_that_lead_out_of_a_directory_are_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "private").write_text("secret")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="leads out|symbolic link"):
        foreign.open_regular(tmp_path / "folder", name)
    with pytest.raises(OSError, match="leads out|symbolic link"):
        foreign.copy(tmp_path / "folder", [name], tmp_path / "copy")
