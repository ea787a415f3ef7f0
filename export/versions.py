"""Numeric version directories, as TensorFlow Serving polls them: each appears complete, and never changes."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

from keras_ddl.errors import ExportError
from keras_ddl.files import durable, version_directories

_WHAT = "An export"
KINDS = ("saved_model.pb", "model.onnx", "model.tflite")  # the file that identifies a version's format


def choose(out_dir: Path, version: int | str | None, step: int | None, kind: str = KINDS[0]) -> Path:
    """Returns the directory of the version to write, which does not exist yet; creates `out_dir`.

    Args:
        version: an integer; None for the highest in `out_dir` plus one; 'step' for `step`.
        kind: the file that identifies the format. A server would try to load a version of another format.
    Raises: ExportError: the version exists or is invalid; `out_dir` is not writable, is a file, or holds versions of
        another format.
    """
    if version == "step":
        version = step
    if version is not None and version_directories.number_of(str(version)) is None:
        raise ExportError(
            f"A version must be a whole number, 0 or more and below 2**63, because TensorFlow Serving loads only "
            f"those. Received: {version!r}. Give a number, 'step', or nothing for the next one."
        )
    if version is not None and os.path.lexists(out_dir / str(int(version))):
        raise _exists(out_dir / str(int(version)))
    durable.make_directory(out_dir, _WHAT, ExportError)
    files = [entry / other for entry in _versions_in(out_dir).values() for other in KINDS if other != kind]
    others = [file for file in files if os.path.lexists(file)]
    if others:
        raise ExportError(
            f"A directory must hold versions of one format, because a server loads the highest. Received: {others[0]}, "
            f"where {kind} is to be written. Give another directory."
        )
    durable.sweep_temporaries(out_dir)
    return _next(out_dir) if version is None else out_dir / str(int(version))


def publish(staged: Path, final: Path, keep: int | None, *, automatic: bool) -> tuple[Path, tuple[int, ...]]:
    """Syncs the staged files and renames them to the version's directory.

    Args:
        keep: how many versions stay, as in `_prune`; None: all.
        automatic: whether `choose` chose the number; if another export took it meanwhile, the next one is used.
    Returns: that directory, and the versions that were removed.
    Raises: ExportError: another export took the number that the user chose.
    """
    while True:
        try:
            durable.publish(staged, final, replace=False)
            break
        except FileExistsError as error:
            if error.errno != errno.EEXIST:
                raise
            if not automatic:
                raise _exists(final) from error
        final = _next(final.parent)
    return final, () if keep is None else tuple(_prune(final, keep))


def _prune(final: Path, keep: int) -> list[int]:
    """Removes all versions except the `keep` highest and `final`; returns the removed versions.

    A version that `keras-ddl serve` is loading stays until the next call. Each version is renamed before its files are
    removed, so that no reader sees an incomplete one. A version that cannot be removed is only a warning, because
    `final` is published.
    """
    found = _versions_in(final.parent)
    removed = []
    for version in [found[number] for number in sorted(found, reverse=True)[keep:] if number != int(final.name)]:
        try:
            if durable.remove_unless_read(version):
                removed.append(int(version.name))
        except OSError as error:
            warnings.warn(durable.explain(error, "Removing an old version", version), stacklevel=2)
    return removed


def _next(out_dir: Path) -> Path:
    highest = max(_versions_in(out_dir).items(), default=(0, out_dir))
    if highest[0] == version_directories.LARGEST:
        raise ExportError(
            f"The next version is the highest in the directory plus one. Received: {highest[1]}, the highest possible "
            f"number. Give a free number with --version (version=), remove that directory, or export to another one."
        )
    return out_dir / str(highest[0] + 1)


def _versions_in(out_dir: Path) -> dict[int, Path]:
    numbered = [(version_directories.number_of(entry.name), entry) for entry in sorted(out_dir.iterdir(), reverse=True)]
    return {number: entry for number, entry in numbered if number is not None}


def _exists(final: Path) -> ExportError:
    return ExportError(
        f"A version is never overwritten, because a server may be reading it. Received: {final}, which already exists. "
        f"Give another --version (version=), leave it out for the next number, or remove the directory."
    )
