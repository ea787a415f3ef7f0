"""Makes temporary folders that are removed with their process."""

from __future__ import annotations

import tempfile


def scratch_folder(name: str, run_dir: str | None) -> tempfile.TemporaryDirectory[str]:
    """Returns a new folder, which is removed with the object or when the process ends.

    Args:
        name: the purpose; a part of the folder's name.
        run_dir: KERAS_DDL_RUN_DIR, where the launcher removes the folder even if the process is killed; None: unset.
    """
    return tempfile.TemporaryDirectory(prefix=f"keras_ddl-{name}-", dir=run_dir, ignore_cleanup_errors=True)
