"""Messages of TensorFlow Serving's config files that tensorflow-serving-api lacks, and their parser.

Field numbers: tensorflow_serving/config/ssl_config.proto and monitoring_config.proto.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from keras_ddl.errors import ConfigError

# Message -> field -> (number, type); the type is protobuf's, or the name of a preceding message.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "SSLConfig": {
        "server_key": (1, "string"),
        "server_cert": (2, "string"),
        "custom_ca": (3, "string"),
        "client_verify": (4, "bool"),
    },
    "PrometheusConfig": {"enable": (1, "bool"), "path": (2, "string")},
    "MonitoringConfig": {"prometheus_config": (1, "PrometheusConfig")},
}
_PACKAGE = "keras_ddl.serving.config"


@functools.cache
def _type(name: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            added = described.field.add(name=field, number=number, label=kinds.LABEL_OPTIONAL)
            if kind in _MESSAGES:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def read_file(path: str, name: str) -> Any:
    """Reads a message of the type `name` from a file in protocol buffer text format. Raises: ConfigError."""
    try:
        return text_format.Parse(Path(path).read_text(), _type(name)())
    except (text_format.ParseError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"The file must be a {name} as text. Received: {path!r}: {error}.") from None
