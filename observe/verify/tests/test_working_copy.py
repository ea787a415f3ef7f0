"""The copy of the working directory: a program finds its files there, and cannot change the originals."""

from __future__ import annotations

import errno
import os
import shutil
import types
from pathlib import Path

import pytest

from keras_ddl.errors import ConfigError
from keras_ddl.verify import working_copy


def project(tmp_path: Path) -> Path:
    here = tmp_path / "home" / "project" / "examples"
    for name in ("ckpt", ".git", ".venv", "__pycache__"):
        (here / name).mkdir(parents=True)
    (here / "train.py").write_text("print()")
    (here / "ckpt" / "state").write_text("of the real training")
    (here / "large").write_bytes(bytes(1 << 21))
    (here / ".git" / "HEAD").write_text("main")
    (here / ".venv" / "pyvenv.cfg").touch()
    for name in ("data", "mounted"):
        (tmp_path / "home" / "project" / name).mkdir()
        (tmp_path / "home" / "project" / name / "x.csv").write_text("1,2")
    links = {"one.csv": "../data/x.csv", "mine": "ckpt/state", "best": "ckpt", "far": "../mounted", "gone": "../none"}
    for name, to in {**links, "loop": "loop", ".env": ".venv"}.items():
        (here / name).symlink_to(to)
    return here


def test_working_copy_reads_like_the_directory_and_leaves_it_unchanged(tmp_path: Path) -> None:
    here = project(tmp_path)
    made = working_copy.make(here, tmp_path / "runs" / "files")
    copy = made.directory
    assert (copy / "train.py").read_text() == "print()"
    assert (copy / ".." / "data" / "x.csv").read_text() == "1,2"
    assert (copy / "large").stat().st_mtime_ns == (here / "large").stat().st_mtime_ns
    for name in ("far/x.csv", "one.csv"):
        assert (copy / name).read_text() == "1,2"
    for name in ("mine", "best/state"):
        assert (copy / name).read_text() == "of the real training"
    assert made.linked == ("far",)
    for name in ("gone", "loop", ".venv", ".env", "__pycache__"):
        assert not os.path.lexists(copy / name)
    (copy / "ckpt" / "new").write_text("new")
    (copy / "train.py").unlink()
    assert [each.name for each in (here / "ckpt").iterdir()] == ["state"]
    assert (here / "train.py").exists()


@pytest.mark.parametrize("name", ["ckpt/state", "large", "one.csv", "best/state"])
def test_working_copy_does_not_write_to_the_originals(tmp_path: Path, name: str) -> None:
    here = project(tmp_path)
    before = (here / name).read_bytes()
    copy = working_copy.make(here, tmp_path / "runs" / "files").directory
    (copy / name).write_text("other")
    assert (copy / name).read_text() == "other" and (here / name).read_bytes() == before


@pytest.mark.parametrize("error", [None, errno.EXDEV])
def test_files_are_copied_if_the_kernel_cannot_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    def copy_file_range(*_: int) -> int:
        if error is None:
            return 0  # like some file systems
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    copy = working_copy.make(project(tmp_path), tmp_path / "runs" / "files").directory
    assert (copy / "large").read_bytes() == bytes(1 << 21)


@pytest.mark.parametrize(
    ("bound", "value", "message"),
    [
        (
            "_MOST_BYTES",
            1 << 20,
            "of at most 0.00 GiB. Received: .* with 0.00 GiB, of which large has .* into another directory",
        ),
        ("_MOST_ENTRIES", 5, "which has more than 5 files and directories. Run it in a directory"),
        ("disk_usage", 3 << 20, "half of the free space.*with --keep DIR"),
    ],
)
def test_too_large_directory_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, message: str
) -> None:
    if bound == "disk_usage":
        monkeypatch.setattr(shutil, bound, lambda _: types.SimpleNamespace(free=value))
    else:
        monkeypatch.setattr(working_copy, bound, value)
    with pytest.raises(ConfigError, match=message):
        working_copy.make(project(tmp_path), tmp_path / "runs" / "files")
    assert not [each for each in (tmp_path / "runs").rglob("*") if each.is_file() or each.is_symlink()]


@pytest.mark.parametrize("kept", [".", "kept/below"])
def test_working_copy_below_its_own_source(tmp_path: Path, kept: str) -> None:
    (tmp_path / "a").write_text("a")
    run = tmp_path / kept / "run-2"
    (run / "recording").mkdir(parents=True)
    (tmp_path / kept / "b").touch()
    copy = working_copy.make(tmp_path, run / "files", (run, run.parent)).directory
    assert (copy / "a").read_text() == "a"
    assert not (copy / kept / "run-2").exists()
    assert (copy / kept / "b").exists() == (kept == ".")
