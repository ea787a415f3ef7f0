"""Records the last complete checkpoint that this process knows, for the message when a job ends with an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keras_ddl.files import news
from keras_ddl.files.durable import write_whole

FILE = "checkpoint.json"  # written to KERAS_DDL_RUN_DIR for the launcher

_known: dict[str, Any] = {}


def note(path: Path, step: int, resume: bool, run_dir: str | None, *, is_news: bool = False) -> None:
    """Records that the checkpoint of `step` is complete. `resume`: whether a restarted program continues from it.

    `run_dir`: where the launcher reads the record, None without a launcher. A failure to write it is ignored.
    `is_news`: this process has just written it, so watchers of the job are told.
    """
    checkpoint = {"path": str(path.absolute()), "step": step, "resume": resume}
    if checkpoint == _known:
        return
    _known.update(checkpoint)
    if run_dir is not None:
        text = json.dumps(_known)
        try:
            write_whole(Path(run_dir) / FILE, lambda part: Path(part).write_text(text), synced=False)
        except OSError:  # e.g. a full disk, which ends the job anyway
            pass
        if is_news:
            news.add_checkpoint(run_dir, _known)


def known() -> dict[str, Any] | None:
    return dict(_known) if _known else None


def read(run_dir: Path) -> dict[str, Any] | None:
    """Returns the last record in `run_dir`, or None."""
    try:
        record = json.loads((run_dir / FILE).read_bytes()[:4096])
        return {"path": str(record["path"]), "step": int(record["step"]), "resume": bool(record["resume"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resume_hint(checkpoint: dict[str, Any]) -> str:
    """Returns a line that says how to resume from the checkpoint."""
    how = "start the same command again"
    if not checkpoint["resume"]:
        how += ", with resume=True in callbacks.Checkpoint"
    return f"The last checkpoint is {checkpoint['path']}. To continue from it, {how}."
