"""Numeric version directories, as TensorFlow Serving polls them: each appears whole, by one rename, and stays as is."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path

from keras_ddl.errors import ExportError
from keras_ddl.files import durable

_WHAT = "An export"
KINDS = ("saved_model.pb", "model.onnx", "model.tflite")  # one of these tells what a version is


def choose(out_dir: Path, version: int | str | None, step: int | None, kind: str = KINDS[0]) -> Path:
    """Returns the directory of the version to write, which does not exist yet; creates `out_dir`.

    Args:
        version: a whole number; None for the highest in `out_dir` plus one; 'step' for `step`.
        kind: the file that tells what is written. A server would try to load a version of another kind.
    Raises: ExportError: it exists, is no version, or `out_dir` may not be written to, is a file, or holds versions of
        another kind.
    """
    if version == "step":
        version = step
    if version is not None and not (str(version).isascii() and str(version).isdigit() and int(version) < 2**63):
        raise ExportError(
            f"A version must be a whole number, 0 or more, because TensorFlow Serving loads only those. Received: "
            f"{version!r}. Give a number, 'step', or nothing for the next one."
        )
    if version is not None and (out_dir / str(int(version))).exists():
        raise _exists(out_dir / str(int(version)))
    durable.make_directory(out_dir, _WHAT, ExportError)
    others = [file for other in KINDS if other != kind for file in out_dir.glob(f"[0-9]*/{other}")]
    if others:
        raise ExportError(
            f"A directory holds versions of one kind, for a server loads the highest. Received: {others[0]}, where "
            f"{kind} is to be written. Give another directory."
        )
    durable.sweep_temporaries(out_dir)
    return _next(out_dir) if version is None else out_dir / str(int(version))


def publish(staged: Path, final: Path, *, automatic: bool) -> Path:
    """Syncs and renames; returns the directory of the version.

    Args:
        automatic: `choose` chose the number: where another export has taken it meanwhile, the next one does as well.
    Raises: ExportError: another export has taken a number that was asked for.
    """
    while True:
        try:
            durable.publish(staged, final, replace=False)
            return final
        except FileExistsError as error:
            if error.errno != errno.EEXIST:
                raise
            if not automatic:
                raise _exists(final) from error
        final = _next(final.parent)


def prune(final: Path, keep: int) -> list[Path]:
    """Removes all versions beside `final` but the `keep` highest and `final` itself; returns what was removed.

    A server serves the highest versions. One that `keras-ddl serve` is loading stays until the next time, even if
    higher ones came meanwhile. Each vanishes by one rename before its files are removed: nobody sees half of one. One
    that cannot be removed is a warning, for `final` is published.
    """
    numbers = sorted((int(entry.name) for entry in final.parent.iterdir() if _is_version(entry.name)), reverse=True)
    removed = []
    for version in [final.parent / str(number) for number in numbers[keep:] if number != int(final.name)]:
        try:
            if durable.remove_unless_read(version):
                removed.append(version)
        except OSError as error:
            warnings.warn(durable.explain(error, "Removing an old version", version), stacklevel=2)
    return removed


def _next(out_dir: Path) -> Path:
    taken = [int(entry.name) for entry in out_dir.iterdir() if _is_version(entry.name)]
    return out_dir / str(max(taken, default=0) + 1)


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _exists(final: Path) -> ExportError:
    return ExportError(
        f"A version is never overwritten, for a server may be reading it. Received: {final}, which exists already. "
        f"Give another --version (version=), leave it out for the next number, or remove the directory."
    )
