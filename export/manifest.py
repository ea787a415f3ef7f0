"""manifest.json of a base graph: what it reads and answers, which checkpoint keys it takes, and that it is unaltered.

format, tensorflow, keras      versions
inputs, outputs                of serving_default: name -> [dtype, shape]
signatures                     names
variables                      [key, dtype, shape] of all the model's variables, in Keras's order (model_state.match)
captured                       keys, of these, that the graph reads: what an export copies from a checkpoint
untracked                      [key, dtype, shape] of variables that the graph reads and Keras does not know
constants                      key -> SHA-256 of variables that the graph does not read and training should not move
h5, objects                    key -> place in .weights.h5 files and in tf.train.Checkpoint (weight_files.py)
static                         keys in variables/static: object graph, lookup tables
ops, warnings                  of the scan;   allow_ops  custom ops the user vouched for
sample                         'given', 'made up' or null;   random  outputs that are not compared
half                           whether the model computes in 16 bits
files                          size and SHA-256 of every other file;   sha256  of this record
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.checkpoint import BASE, durable
from keras_ddl.errors import ExportError

FORMAT = 1
NAME = "manifest.json"
SAMPLE = "sample.npz"
STATIC = "variables/static"


@dataclass(frozen=True)
class Manifest:
    """A base graph on disk: its directory and its record."""

    path: Path
    record: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.record[name]

    @property
    def sample(self) -> Path | None:
        """The stored rows, if there are any."""
        return self.path / SAMPLE if self.record["sample"] else None


def write(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record of a filled base directory, with its inventory and seal."""
    record = {"format": FORMAT, **record, "files": durable.inventory(folder)}
    (folder / NAME).write_text(json.dumps(durable.sealed(record), indent=1))


def read(ckpt_dir: str | Path) -> Manifest:
    """Reads and verifies the base graph of a checkpoint directory; every file is compared with its SHA-256.

    Raises: ExportError: there is none, or it is damaged.
    """
    path = Path(ckpt_dir) / BASE
    if not path.is_dir() and path.with_name(BASE + durable.REPLACED).is_dir():
        path = path.with_name(BASE + durable.REPLACED)
    if not path.is_dir():
        raise ExportError(
            f"An export needs the base graph that training writes. Received: {ckpt_dir} without {BASE}/. Train with "
            f"callbacks.Checkpoint(..., export_base=True), or call export.write_base_graph(model, {str(ckpt_dir)!r})."
        )
    try:
        record = json.loads((path / NAME).read_text())
    except FileNotFoundError:
        _refuse(path, f"{NAME} is missing")
    except (OSError, ValueError) as error:
        _refuse(path, f"{NAME} cannot be read ({error})")
    if not durable.is_sealed(record):
        _refuse(path, f"{NAME} was altered after it was written (its SHA-256 differs)")
    if record["format"] != FORMAT:
        _refuse(
            path, f"{NAME} is of format {record['format']}, not {FORMAT}; export with the keras_ddl that trained it"
        )
    problem = durable.difference(path, record["files"], contents=True)
    if problem is not None:
        _refuse(path, problem)
    return Manifest(path, record)


def _refuse(path: Path, problem: str) -> None:
    raise ExportError(
        f"The base graph must be as training wrote it. Received: {path}: {problem}. Copy it again, or train one step "
        f"with resume=True, which writes it anew."
    )
