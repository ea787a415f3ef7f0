"""TLS for both interfaces, from TensorFlow Serving's SSLConfig file (--ssl_config_file)."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.errors import ConfigError
from keras_ddl.serving import messages


@dataclass(frozen=True)
class Tls:
    """Keys and certificates as PEM text.

    Attributes:
        authority: the CA for clients' certificates; "": they are not checked.
    """

    key: str
    certificate: str
    authority: str = ""

    def credentials(self) -> Any:
        """Returns the server credentials for gRPC."""
        import grpc

        return grpc.ssl_server_credentials(
            [(self.key.encode(), self.certificate.encode())],
            root_certificates=self.authority.encode() or None,
            require_client_auth=bool(self.authority),
        )

    def context(self) -> ssl.SSLContext:
        """Returns the server context for Python's ssl."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=self.authority or None)
        if self.authority:
            context.verify_mode = ssl.CERT_REQUIRED
        with tempfile.TemporaryDirectory() as folder:  # Python loads a server's chain only from files
            key, chain = Path(folder, "key.pem"), Path(folder, "chain.pem")
            key.touch(mode=0o600)
            key.write_text(self.key)
            chain.write_text(self.certificate)
            context.load_cert_chain(chain, key)
        return context


def read_file(path: str) -> Tls:
    """Reads an SSLConfig in protocol buffer text format: server_key, server_cert, custom_ca, client_verify.

    Raises: ConfigError: the file, or a key or certificate in it, is invalid.
    """
    config = messages.read_file(path, "SSLConfig")
    if config.client_verify and not config.custom_ca:
        raise ConfigError(f"client_verify needs custom_ca, the CA of clients' certificates. Received: {path!r}.")
    tls = Tls(config.server_key, config.server_cert, config.custom_ca if config.client_verify else "")
    try:
        tls.context()
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"server_key and server_cert must be PEM. Received: {path!r}: {error}.") from None
    return tls
