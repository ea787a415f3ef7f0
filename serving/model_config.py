"""Describes the models and versions to serve, as TensorFlow Serving's ModelServerConfig does."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl.errors import ConfigError
from keras_ddl.files import foreign, version_directories

_MOST_MODELS = 1000  # per request, because the process that clients connect to reads it


@dataclass(frozen=True)
class ModelConfig:
    """One model to serve.

    Attributes:
        latest: how many of the highest versions to serve; 0: all, unless `specific` names some.
        specific: the versions to serve, instead of the highest.
        labels: label -> version.
    """

    name: str
    base_path: Path
    latest: int = 1
    specific: tuple[int, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict)

    def choose(self, on_disk: Sequence[int]) -> list[int]:
        """Returns the versions on disk that should be served, highest first."""
        versions = sorted(on_disk, reverse=True)
        if self.specific:
            return [version for version in versions if version in self.specific]
        return versions[: self.latest] if self.latest else versions


def read_file(path: str) -> list[ModelConfig]:
    """Reads TensorFlow Serving's model config file: a ModelServerConfig in protocol buffer text format.

    Raises: ConfigError: the file is invalid.
    """
    from google.protobuf import text_format

    from keras_ddl.serving.protocol import messages

    try:
        return models_from_proto(text_format.Parse(Path(path).read_text(), messages.message("ModelServerConfig")()))
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ConfigError(
            "A model config file must be text. Error parsing text-format tensorflow.serving.ModelServerConfig: "
            f"{path!r}: {str(error).rstrip('.')}. See serving/docs/serving.md."
        ) from None


def models_from_bytes(data: bytes) -> list[ModelConfig]:
    """Returns the models of a serialized ModelServerConfig.

    Raises: ConfigError: as models_from_proto, or there is no config.
    """
    from google.protobuf.message import DecodeError

    from keras_ddl.serving.protocol import messages

    try:
        config = messages.message("ModelServerConfig").FromString(data)
    except DecodeError as error:
        raise ConfigError(f"This is not a valid ModelServerConfig: {error}") from None
    if config.WhichOneof("config") is None:
        raise ConfigError("The request has no config, so the server would serve nothing. Send a model_config_list.")
    count = len(config.model_config_list.config)
    if count > _MOST_MODELS:
        raise ConfigError(f"A request may list at most {_MOST_MODELS} models. Received: {count}.")
    return models_from_proto(config)


def models_from_proto(config: Any) -> list[ModelConfig]:
    """Returns the models of a ModelServerConfig. Raises: ConfigError: a model is incomplete or listed twice."""
    if config.WhichOneof("config") == "custom_model_config":
        raise ConfigError("Models must be given as a list. Received: custom_model_config. Use model_config_list.")
    models = [_model_from_proto(each) for each in config.model_config_list.config]
    counts = collections.Counter(model.name for model in models)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ConfigError(f"Each model must have a unique name. Received: {twice} more than once.")
    return models


def _model_from_proto(config: Any) -> ModelConfig:
    if not config.name or not config.base_path:
        raise ConfigError(f"A model must have a name and a base_path. Received: {str(config).strip()!r}.")
    if config.model_platform not in ("", "tensorflow"):
        raise ConfigError(
            f"The model platform must be 'tensorflow'. Received: {config.model_platform!r} for {config.name!r}."
        )
    policy = config.model_version_policy
    kind = policy.WhichOneof("policy_choice")
    return ModelConfig(
        config.name,
        Path(config.base_path.removeprefix("file://")),
        latest={"all": 0, "latest": policy.latest.num_versions or 1}.get(kind, 1),
        specific=tuple(policy.specific.versions),
        labels=dict(config.version_labels),
    )


def versions_on_disk(base_path: Path) -> tuple[dict[int, Path], dict[int, str]]:
    """Returns number -> directory of the versions, and number -> error of versions that cannot be read.

    Versions without a graph are still being written, and left out. Of two names for one number (7 and 007), the
    alphabetically first counts.

    Raises: OSError: the directory cannot be read: no permission, no free descriptors, or a disk failure.
    """
    try:
        entries = sorted(base_path.iterdir(), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}, {}
    found: dict[int, Path] = {}
    wrong: dict[int, str] = {}
    for entry in entries:
        number = version_directories.number_of(entry.name)
        if number is None:
            continue
        try:
            if _has_graph(entry):
                found[number] = entry
        except OSError as error:
            wrong[number] = f"{entry}: {error.strerror}"
    return found, {number: text for number, text in wrong.items() if number not in found}


def _has_graph(path: Path) -> bool:
    for name in ("saved_model.pb", "saved_model.pbtxt"):
        try:
            foreign.check_opens(path / name)
            return True
        except (FileNotFoundError, NotADirectoryError):  # not Path.exists, which would treat any error as absence
            pass
    return False
