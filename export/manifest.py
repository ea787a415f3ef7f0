"""manifest.json of a base graph: its inputs and outputs, the checkpoint keys that it reads, and checksums of its files.

format, tensorflow, keras      versions
name                           of the part of the model whose graph this is (base-<name>/)
inputs, outputs                of serving_default: name -> [dtype, shape]
composites                     sparse and ragged inputs -> shape; inputs lists their components
signatures                     names
declared                       signature -> {public name: key of answers or layers}
answers                        outputs of the function that named signatures share: name -> [dtype, shape], in order
layers                         layers inside it -> [place, dtype, shape]
float32                        whether 16-bit floats are cast
images                         signatures that take encoded images -> the input that they decode to, and its size
own_inputs                     signatures of functions with their own inputs -> {input: [dtype, shape]}; {} where an
                               export has replaced one
variables                      [key, dtype, shape] of all the model's variables, in Keras's order (model_state.match);
                               for a part of a model, all variables of the complete model, as in its checkpoints
own, trainable                 keys of variables that the model itself owns, and that are trained; in Keras's order
captured                       keys of variables that the graph reads, which an export copies from a checkpoint
untracked                      [key, dtype, shape] of variables that the graph reads and Keras does not track
constants                      key -> SHA-256 of variables that the graph does not read and training should not change
h5, h5_of_whole, objects       key -> place in .weights.h5 files (of the model; of the complete model, if it is a part)
                               and in tf.train.Checkpoint (weight_files.py, object_graphs.py)
static                         keys in variables/static: object graph, lookup tables
ops, warnings                  of the scan
allow_ops                      custom ops that the user declared
sample                         'given', 'made up' or null
random                         outputs that are not compared
half                           whether the model computes in 16 bits
files                          size and SHA-256 of every other file
sha256                         of this record
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from keras_ddl.checkpoint.listing import BASE, base_directory, list_bases
from keras_ddl.errors import ExportError
from keras_ddl.files import digests, durable, foreign

FORMAT = 1
NAME = "manifest.json"
SAMPLE = "sample.npz"
STATIC = "variables/static"
PROVENANCE = "keras_ddl_export.json"  # in a version's assets.extra: its origin


@dataclass(frozen=True)
class Manifest:
    """A base graph on disk: its directory and its record."""

    path: Path
    record: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        if name not in self.record:
            _refuse(self.path, f"{NAME} lacks {name}")
        return self.record[name]

    @property
    def name(self) -> str | None:
        """Name of the part of the model that this graph computes; None: the whole model."""
        return self.record["name"]

    @property
    def sample(self) -> Path | None:
        """The stored rows, if there are any."""
        return self.path / SAMPLE if self.record["sample"] else None


def write(folder: Path, record: dict[str, Any]) -> None:
    """Writes manifest.json: the record, with sizes and checksums of the directory's files and of itself."""
    record = {"format": FORMAT, **record, "files": digests.inventory(folder)}
    (folder / NAME).write_text(json.dumps(digests.sealed(record), indent=1))


def is_name(name: object) -> bool:
    """Whether a part of a model may have this name in a checkpoint directory."""
    return isinstance(name, str) and re.fullmatch(r"[\w-]+", name, re.ASCII) is not None


def read(ckpt_dir: str | Path, name: str | None = None) -> Manifest:
    """Reads a base graph's manifest from a checkpoint directory, and verifies the SHA-256 of every file.

    Args:
        name: the part of the model; None: the model itself, or the only part.
    Raises: ExportError: no base graph has that name, there are several and `name` is None, or it is damaged.
    """
    names = list_bases(ckpt_dir) if Path(ckpt_dir).is_dir() else []
    parts = [each for each in names if each is not None]
    if names and name not in names:
        if name is not None or len(parts) > 1:
            remedy = f"Name one: --model {parts[0]}" if parts else "Leave --model out"
            raise ExportError(
                f"An export needs exactly one model. Received: {ckpt_dir} with base graphs of "
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
        if (strange := foreign.strange_entry(path)) is not None:
            _refuse(path, f"{strange}, which an export does not read")
        record = foreign.read_json(path, NAME)
    except FileNotFoundError:
        _refuse(path, f"{NAME} is missing")
    except (OSError, ValueError) as error:
        _refuse(path, f"{NAME} cannot be read ({error})")
    if not digests.is_sealed(record):
        _refuse(path, f"{NAME} was altered after it was written (its SHA-256 differs)")
    if record.get("format") != FORMAT:
        _refuse(
            path, f"{NAME} has format {record.get('format')}, not {FORMAT}; export with the keras_ddl that trained it"
        )
    base = Manifest(path, record)
    problem = digests.difference(path, base["files"], contents=True)
    if problem is not None:
        _refuse(path, problem)
    return base


def _refuse(path: Path, problem: str) -> NoReturn:
    raise ExportError(
        f"The base graph must be intact. Received: {path}: {problem}. Copy it again, or train one step with "
        f"resume=True, which rewrites it."
    )
