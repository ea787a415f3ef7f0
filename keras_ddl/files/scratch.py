"""Temporary folders of a process that go away with it."""

from __future__ import annotations

import tempfile


def scratch_folder(name: str, run_dir: str | None) -> tempfile.TemporaryDirectory[str]:
    """Returns a new folder, which is removed with the object or when the process ends.

    Args:
        name: what it is for; a part of the folder's name.
        run_dir: KERAS_DDL_RUN_DIR, where the launcher removes it, also when the process is killed; None: there is none.
    """
    return tempfile.TemporaryDirectory(prefix=f"keras_ddl-{name}-", dir=run_dir, ignore_cleanup_errors=True)
