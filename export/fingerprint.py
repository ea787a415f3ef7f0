"""Updates fingerprint.pb after part of a SavedModel was rewritten. Any 64-bit hashes will do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_ddl.files import digests

_FILE = "fingerprint.pb"


def follow_weights(folder: Path) -> None:
    """Updates the hash of the weights, the only field in which versions of one graph differ."""
    index = digests.digest(folder / "variables" / "variables.index")
    _change(folder, lambda fingerprint: setattr(fingerprint, "checkpoint_hash", int(index[:16], 16)))


def follow_graph(folder: Path, meta_graph: Any) -> None:
    """Updates the hashes of saved_model.pb, which holds `meta_graph`."""

    def change(fingerprint: Any) -> None:
        fingerprint.saved_model_checksum = _hash((folder / "saved_model.pb").read_bytes())
        fingerprint.graph_def_program_hash = _hash(_bytes_of(meta_graph.graph_def))
        fingerprint.saved_object_graph_hash = _hash(_bytes_of(meta_graph.object_graph_def))
        signatures = [name.encode() + _bytes_of(proto) for name, proto in sorted(meta_graph.signature_def.items())]
        fingerprint.signature_def_hash = _hash(b"".join(signatures))

    _change(folder, change)


def _change(folder: Path, change: Callable[[Any], None]) -> None:
    from tensorflow.core.protobuf import fingerprint_pb2

    file = folder / _FILE
    if file.exists():  # TensorFlow can be configured not to write it
        fingerprint = fingerprint_pb2.FingerprintDef.FromString(file.read_bytes())
        change(fingerprint)
        file.write_bytes(_bytes_of(fingerprint))


def _bytes_of(proto: Any) -> bytes:
    return proto.SerializeToString(deterministic=True)


def _hash(content: bytes) -> int:
    return int(hashlib.sha256(content).hexdigest()[:16], 16)
