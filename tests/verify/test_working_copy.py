"""The directory in which a verified program runs: it finds its files there, and does no harm."""

from __future__ import annotations

from pathlib import Path

from keras_ddl.verify import working_copy


def test_working_copy_reads_as_the_directory_and_keeps_it_as_it_is(tmp_path: Path) -> None:
    here = tmp_path / "home" / "project" / "examples"
    (here / "ckpt").mkdir(parents=True)
    (here / "train.py").write_text("print()")
    (here / "ckpt" / "state").write_text("of the real training")
    (here / "large").write_bytes(bytes(1 << 21))
    (here / ".git").mkdir()
    (tmp_path / "home" / "project" / "data").mkdir()
    (tmp_path / "home" / "project" / "data" / "x.csv").write_text("1,2")
    copy = working_copy.make(here, tmp_path / "runs" / "files")
    assert (copy / "train.py").read_text() == "print()"
    assert (copy / ".." / "data" / "x.csv").read_text() == "1,2"
    assert (copy / "large").is_symlink() and (copy / ".git").is_symlink()
    (copy / "ckpt" / "state").write_text("other")
    (copy / "ckpt" / "new").write_text("new")
    (copy / "train.py").unlink()
    assert (here / "ckpt" / "state").read_text() == "of the real training"
    assert [each.name for each in (here / "ckpt").iterdir()] == ["state"]
    assert (here / "train.py").exists()


def test_working_copy_below_its_own_source(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    copy = working_copy.make(tmp_path, tmp_path / "kept" / "run-1" / "files")
    assert (copy / "a").read_text() == "a"
    assert (copy / "kept").is_symlink()
