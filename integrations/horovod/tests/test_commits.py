"""Commits on disk are complete or absent, whatever happens to the writer."""

from __future__ import annotations

import os
import pickle
import random
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_ddl
from keras_ddl import checkpoint
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.horovod import commits


@pytest.fixture(autouse=True)
def alone():
    keras_ddl.init()


def test_newest_commit_of_all_ranks_is_found(tmp_path: Path) -> None:
    mine = commits.Commits(tmp_path)
    assert commits.newest(mine) is None
    for number in (9, 10, 11):
        mine.write(number, {"number": number, "array": np.arange(number)})
    assert [each.step for each in mine.found()] == [11, 10]  # the previous commit stays
    (tmp_path / "rank-0").rename(tmp_path / "rank-4")
    mine.write(10, "older")
    number, root, content = commits.newest(mine)
    assert (number, root, content["number"], content["array"].size) == (11, 0, 11, 11)


@pytest.mark.parametrize("tear", [lambda data: data[:-1], lambda data: b"", lambda data: b"\0" + data[1:]])
def test_truncated_commit_is_skipped(tmp_path: Path, tear) -> None:
    mine = commits.Commits(tmp_path, synced=True)
    mine.write(1, "one")
    mine.write(2, "two")
    content = mine.found()[0].path / "content.pickle"
    content.write_bytes(tear(content.read_bytes()))
    with pytest.raises(CheckpointError, match="content.pickle"):
        commits.read(mine.found()[0])
    assert commits.newest(mine) == (1, 0, "one")
    mine.write(2, "two again")
    assert commits.newest(mine) == (2, 0, "two again")


def test_unwritable_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("a file")
    with pytest.raises(ConfigError, match="rank-0, which is not a directory"):
        commits.Commits(tmp_path).write(1, "one")


WRITER = """
import sys, numpy as np, keras_ddl
from pathlib import Path
from keras_ddl.horovod import commits
keras_ddl.init()
mine = commits.Commits(Path(sys.argv[1]))
mine.sweep()
number = (commits.newest(mine) or (0,))[0]
while True:
    number += 1
    mine.write(number, [number, np.full(300_000, number)])
    print(number, flush=True)
"""


def test_killed_writer_leaves_the_last_commit_or_the_next(tmp_path: Path) -> None:
    generator, before = random.Random(3), 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert int(writer.stdout.readline()) == before + 1
            time.sleep(generator.uniform(0.02, 0.1))
            writer.kill()
            said = writer.stdout.read().splitlines()  # the last line may be truncated, too
        last = int(said[-2]) if len(said) > 1 else before + 1
        number, _, (content, array) = commits.newest(commits.Commits(tmp_path))
        assert last <= number <= last + 2 and content == number and (array == number).all(), (last, number)
        before = number
    after = commits.Commits(tmp_path)
    after.sweep()
    after.write(before + 1, "after")  # removes what the killed writer did not
    names = sorted(path.name for path in (tmp_path / "rank-0").iterdir())
    assert names == sorted(f"ckpt-{number:08d}" for number in (before, before + 1)), names


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch made",)


def write_foreign_commit(folder: Path) -> Path:
    """Writes an intact commit that is newer than all others; returns its content."""

    def fill(staged: Path) -> dict[str, Any]:
        (staged / "content.pickle").write_bytes(pickle.dumps(Evil()))
        return {}

    return checkpoint.write(folder, 999, fill).path / "content.pickle"


def give_away(path: Path, top: Path) -> None:
    for each in (path, *path.parents):
        if each == top:
            return
        os.chown(each, 65534, 65534)


PLANTS = ["link", "hard link", "FIFO", "for all", "in a directory for all", "in a linked directory"]


@pytest.mark.parametrize("kind", [*PLANTS, *(["by another user", "all by another user"] if os.geteuid() == 0 else [])])
def test_foreign_commits_are_never_unpickled(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configured = tmp_path / "configured"
    configured.mkdir()
    configured.chmod(0o1777)
    monkeypatch.setenv("KERAS_DDL_COMMIT_DIR", str(configured))
    mine = commits.of_job("state")
    if kind != "all by another user":
        mine.write(1, "one")
        assert commits.newest(mine) == (1, 0, "one")
    rank = mine.directory / "rank-7"
    elsewhere = tmp_path / "elsewhere"
    match kind:
        case "link":
            rank.mkdir(mode=0o700)
            (rank / "ckpt-00000999").symlink_to(write_foreign_commit(elsewhere).parent)
        case "hard link":
            content = write_foreign_commit(rank)
            (tmp_path / "another name").hardlink_to(content)
        case "FIFO":
            content = write_foreign_commit(rank)
            content.unlink()
            os.mkfifo(content)
        case "for all":
            write_foreign_commit(rank).chmod(0o666)
        case "in a directory for all":
            write_foreign_commit(rank)
            rank.chmod(0o777)
        case "in a linked directory":
            write_foreign_commit(elsewhere)
            rank.symlink_to(elsewhere)
        case "by another user":
            give_away(write_foreign_commit(rank), mine.directory)
        case "all by another user":
            give_away(write_foreign_commit(rank), configured)
    with pytest.raises(ConfigError, match="only a job's user may have access"):
        commits.newest(mine)
    assert not (tmp_path / "made").exists()
    if kind == "all by another user":
        with pytest.raises(ConfigError, match="only a job's user may have access"):
            mine.write(1, "one")


def test_commits_are_readable_only_by_this_user(tmp_path: Path) -> None:
    mine = commits.Commits(tmp_path / "commits" / "state")
    mine.write(1, "one")
    for folder in (tmp_path / "commits", mine.directory, mine.directory / "rank-0"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    mine.directory.chmod(0o770)
    with pytest.raises(ConfigError, match="which others may write to .mode 0770"):
        mine.write(2, "two")
