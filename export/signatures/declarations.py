"""Parses and checks a user's `signatures=` in training or at an export: outputs, encoded images, functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export.inference.replay import DEFAULT
from keras_ddl.export.signatures import encoded_images
from keras_ddl.export.signatures.encoded_images import EncodedImages
from keras_ddl.export.signatures.functions import Function
from keras_ddl.export.signatures.saved_graph import Outputs, SavedGraph

_MOST = 40  # names in one message
_NAME = re.compile(r"[A-Za-z][\w.-]*")


@dataclass(frozen=True)
class Declared:
    """The signatures that a user declared, by kind.

    Attributes:
        outputs: signature -> {public name: output or layer}.
        images: signature -> EncodedImages.
        functions: signature -> a function of the model's inputs, or a Function.
    """

    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    images: dict[str, EncodedImages] = field(default_factory=dict)
    functions: dict[str, Callable[..., Any] | Function] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, dict[str, str]]:
        """Signature -> {public name: output or layer}, of all signatures that name outputs."""
        image_outputs = {
            name: outputs_of(name, each.outputs) for name, each in self.images.items() if each.outputs is not None
        }
        return {**self.outputs, **image_outputs}

    def __bool__(self) -> bool:
        return bool(self.outputs or self.images or self.functions)


def read(signatures: Mapping[str, Any] | None, *, functions: bool, taken: Iterable[str] = ()) -> Declared:
    """Sorts signatures by kind.

    Args:
        functions: whether functions are allowed: only in training, where the model exists.
        taken: names of signatures that cannot be replaced.
    Raises: ExportError: an invalid name or value.
    """
    declared = Declared()
    if not isinstance(signatures or {}, Mapping):
        raise ExportError(f"signatures must map names to outputs. Received: {type(signatures).__name__}.")
    for name, value in (signatures or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
            raise ExportError(
                f"A signature must have a unique name of letters, digits, '_', '.' and '-'. Received: {name!r}"
                f"{', which already exists' if name in taken else ''}."
            )
        if isinstance(value, EncodedImages):
            declared.images[name] = value
        elif (callable(value) or isinstance(value, Function)) and functions and name != DEFAULT:
            declared.functions[name] = value
        else:
            declared.outputs[name] = outputs_of(name, value)
    return declared


def outputs_of(signature: str, value: Any) -> dict[str, str]:
    """Returns {public name: output or layer}. `value`: a name, a list of names, or such a mapping.

    Raises: ExportError: `value` is none of these.
    """
    if isinstance(value, str):
        return {value: value}
    if isinstance(value, Mapping):
        outputs = dict(value)
    else:
        outputs = {each: each for each in value} if isinstance(value, (list, tuple)) else {}
    names = [*outputs, *outputs.values()]
    if not outputs or not all(isinstance(each, str) and each for each in names):
        raise ExportError(
            f"A signature must be the name of an output or layer, a list of names, a mapping from public names to "
            f"them, EncodedImages(...), or, in training and not for {DEFAULT}, a function of the model's inputs or "
            f"Function(...). Received: {signature!r} with {value!r}."
        )
    return outputs


def check(declared: Declared, answers: Iterable[str], layers: Iterable[str]) -> None:
    """Raises: ExportError: a signature names an unknown output or layer; lists the known ones."""
    answers, layers = list(answers), list(layers)
    for name, outputs in declared.sources.items():
        unknown = sorted(set(outputs.values()) - {*answers, *layers})
        if unknown:
            others = sorted(set(layers) - set(answers))
            more = f" and {len(others) - _MOST} more" if len(others) > _MOST else ""
            inside = f"; layers {others[:_MOST]}{more}" if others else ""
            raise ExportError(
                f"A signature must name outputs of the model or of its layers. Received: {name!r} with {unknown}. "
                f"There are outputs {sorted(answers)}{inside}."
            )


def check_at_export(declared: Declared, record: Mapping[str, Any]) -> None:
    """Raises: ExportError: the base graph lacks what a signature names. `record`: its manifest."""
    outputs = outputs_in(record)
    check(declared, outputs.answers, outputs.layers)
    for each in declared.images.values():
        encoded_images.image_input(each, record["inputs"])


def outputs_in(record: Mapping[str, Any]) -> Outputs:
    return Outputs(record["answers"], record["layers"], record["float32"])


def add_to(folder: Path, declared: Declared, record: Mapping[str, Any]) -> dict[str, Any]:
    """Adds signatures to the SavedModel in `folder`. `record`: the manifest of its base graph.

    Returns: new values of the manifest's "outputs", "signatures", "declared", "images" and "own_inputs".
    """
    graph = SavedGraph(folder, outputs_in(record))
    default = declared.outputs.get(DEFAULT) or record["declared"][DEFAULT]
    images = dict(record["images"])
    sources = {**record["declared"], **declared.outputs}
    replaced = {*declared.outputs, *declared.images}
    for name, outputs in declared.outputs.items():
        images.pop(name, None)
        graph.add(name, outputs)
    for name, each in declared.images.items():
        outputs = default if each.outputs is None else outputs_of(name, each.outputs)
        into = encoded_images.image_input(each, record["inputs"])
        graph.add(name, outputs, encoded_images.trace_decoder(each, into))
        sources.pop(name, None)
        images[name] = {
            "argument": each.name,
            "input": into.name,
            "size": [into.height, into.width],
            "channels": into.channels,
        }
    graph.write()
    return {
        "outputs": {public: list(graph.described(source)) for public, source in default.items()},
        "signatures": sorted({*record["signatures"], *replaced}),
        "declared": sources,
        "images": images,
        "own_inputs": {name: {} if name in replaced else each for name, each in record["own_inputs"].items()},
    }
