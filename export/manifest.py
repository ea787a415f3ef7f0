"""manifest.json of a base graph: what it reads and answers, which checkpoint keys it takes, and that it is unaltered.

format, tensorflow, keras      versions;   name  of the part of the model whose graph this is (base-<name>/)
inputs, outputs                of serving_default: name -> [dtype, shape]
composites                     sparse and ragged inputs -> shape; inputs lists their components
signatures                     names;   declared  signature -> {output: what it answers}, a key of answers or layers
answers                        of the function that all signatures by names share: name -> [dtype, shape], in order
layers                         layers inside of it -> [place, dtype, shape];   float32  whether 16-bit floats are cast
images                         signatures that take encoded images -> which input they make, and of what size
own_inputs                     signatures of functions with inputs of their own -> {input: [dtype, shape]}; {} where an
                               export has put another one in its place
variables                      [key, dtype, shape] of all the model's variables, in Keras's order (model_state.match);
                               of a part's graph, those of the whole, whose checkpoints hold them
own, trainable                 keys, of these, that the model itself has, and that are trained; both in Keras's order
captured                       keys, of these, that the graph reads: what an export copies from a checkpoint
untracked                      [key, dtype, shape] of variables that the graph reads and Keras does not know
constants                      key -> SHA-256 of variables that the graph does not read and training should not move
h5, h5_of_whole, objects       key -> place in .weights.h5 files (of the model; of the whole, if it is a part of one)
                               and in tf.train.Checkpoint (weight_files.py, object_graphs.py)
static                         keys in variables/static: object graph, lookup tables
ops, warnings                  of the scan;   allow_ops  custom ops the user vouched for
sample                         'given', 'made up' or null;   random  outputs that are not compared
half                           whether the model computes in 16 bits
files                          size and SHA-256 of every other file;   sha256  of this record
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.checkpoint import BASE, base_directory, list_bases
from keras_ddl.errors import ExportError
from keras_ddl.files import digests, durable

FORMAT = 1
NAME = "manifest.json"
SAMPLE = "sample.npz"
STATIC = "variables/static"
PROVENANCE = "keras_ddl_export.json"  # in assets.extra of a version: where it came from


@dataclass(frozen=True)
class Manifest:
    """A base graph on disk: its directory and its record."""

    path: Path
    record: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.record[name]

    @property
    def name(self) -> str | None:
        """Of the part of the model whose graph it is; None: the model's own."""
        return self.record.get("name")

    @property
    def own(self) -> list[str]:
        """Keys of the model's own variables."""
        return self.record.get("own", [key for key, _, _ in self["variables"]])

    @property
    def trainable(self) -> list[str]:
        """Keys of its trainable ones."""
        return self.record.get("trainable", [])

    @property
    def own_inputs(self) -> dict[str, Any]:
        """Of signatures with inputs of their own, these: name -> [dtype, shape]."""
        return self.record.get("own_inputs", {})

    @property
    def sample(self) -> Path | None:
        """The stored rows, if there are any."""
        return self.path / SAMPLE if self.record["sample"] else None


def write(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record of a filled base directory, with its inventory and seal."""
    record = {"format": FORMAT, **record, "files": digests.inventory(folder)}
    (folder / NAME).write_text(json.dumps(digests.sealed(record), indent=1))


def is_name(name: object) -> bool:
    """Whether a part of a model may have this name in a checkpoint directory."""
    return isinstance(name, str) and re.fullmatch(r"[\w-]+", name, re.ASCII) is not None


def read(ckpt_dir: str | Path, name: str | None = None) -> Manifest:
    """Reads and verifies a base graph of a checkpoint directory; every file is compared with its SHA-256.

    Args:
        name: of the part of the model whose graph it is; None: the model's own, or that of the only part.
    Raises: ExportError: there is none of that name, or several and no name; or it is damaged.
    """
    names = list_bases(ckpt_dir) if Path(ckpt_dir).is_dir() else []
    parts = [each for each in names if each is not None]
    if names and name not in names:
        if name is not None or len(parts) > 1:
            remedy = f"Name one: --model {parts[0]}" if parts else "Leave --model out"
            raise ExportError(
                f"An export takes one model. Received: {ckpt_dir} with base graphs of "
                f"{', '.join(parts) or 'one model'}, and --model (model=) {name!r}. {remedy}."
            )
        name = parts[0]
    path = Path(ckpt_dir) / base_directory(name)
    if not path.is_dir() and path.with_name(path.name + durable.REPLACED).is_dir():
        path = path.with_name(path.name + durable.REPLACED)
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
    if not digests.is_sealed(record):
        _refuse(path, f"{NAME} was altered after it was written (its SHA-256 differs)")
    if record["format"] != FORMAT:
        _refuse(
            path, f"{NAME} is of format {record['format']}, not {FORMAT}; export with the keras_ddl that trained it"
        )
    problem = digests.difference(path, record["files"], contents=True)
    if problem is not None:
        _refuse(path, problem)
    return Manifest(path, record)


def _refuse(path: Path, problem: str) -> None:
    raise ExportError(
        f"The base graph must be as training wrote it. Received: {path}: {problem}. Copy it again, or train one step "
        f"with resume=True, which writes it again."
    )
