"""TLS for both interfaces, from TensorFlow Serving's SSLConfig file (--ssl_config_file)."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.errors import ConfigError
from keras_ddl.serving import config_messages


@dataclass(frozen=True)
class Tls:
    """Keys and certificates as PEM text.

    Attributes:
        authority: of the certificates that clients must show; "": what they show is not looked at.
    """

    key: str
    certificate: str
    authority: str = ""

    def credentials(self) -> Any:
        """Returns gRPC's form."""
        import grpc

        return grpc.ssl_server_credentials(
            [(self.key.encode(), self.certificate.encode())],
            root_certificates=self.authority.encode() or None,
            require_client_auth=bool(self.authority),
        )

    def context(self) -> ssl.SSLContext:
        """Returns the form of Python's ssl."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=self.authority or None)
        if self.authority:
            context.verify_mode = ssl.CERT_REQUIRED
        with tempfile.TemporaryDirectory() as folder:  # Python loads a server's chain from files alone
            key, chain = Path(folder, "key.pem"), Path(folder, "chain.pem")
            key.touch(mode=0o600)
            key.write_text(self.key)
            chain.write_text(self.certificate)
            context.load_cert_chain(chain, key)
        return context


def read_file(path: str) -> Tls:
    """Reads an SSLConfig as protocol buffer text: server_key, server_cert, custom_ca, client_verify.

    Raises: ConfigError: it is not one, or what it holds is no key or no certificate.
    """
    config = config_messages.read_file(path, "SSLConfig")
    if config.client_verify and not config.custom_ca:
        raise ConfigError(f"client_verify needs custom_ca, whose certificates clients show. Received: {path!r}.")
    found = Tls(config.server_key, config.server_cert, config.custom_ca if config.client_verify else "")
    try:
        found.context()
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"server_key and server_cert must be PEM. Received: {path!r}: {error}.") from None
    return found
