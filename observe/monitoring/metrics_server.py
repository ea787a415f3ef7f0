"""Serves the metrics of a job over HTTP, in threads of the launcher.

Each connection gets a thread for at most a few seconds, only a few connections are open at a time, and the text is made
at most a few times a second. So strangers can block the metrics for a while, but not the launcher's work for its ranks.
The server never contacts a rank.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from keras_ddl import packages
from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.launch.watchers import Watcher

_AT_ONCE = 8  # most open connections
_CONNECTION_SECONDS = 5.0
_TEXT_SECONDS = 0.25  # how long a text of the metrics is reused


class MetricsServer:
    """Listens on `address` and `port` from its construction to `close`. port 0: any free port.

    Raises:
        ConfigError: prometheus-client is not installed.
        LaunchError: the port or the address cannot be used.
    """

    def __init__(self, address: str, port: int) -> None:
        try:
            import prometheus_client

            from keras_ddl.monitoring.metrics import Metrics
        except ImportError:
            raise ConfigError(
                f"--metrics-port needs prometheus-client. Received: {sys.executable}, which cannot import it. "
                f"Install it: {packages.pip_install('[metrics]')}"
            ) from None
        self.watcher: Watcher = Metrics()  # collects the metrics of the job
        registry = prometheus_client.CollectorRegistry()
        registry.register(self.watcher)
        text = _Remembered(lambda: prometheus_client.generate_latest(registry))
        try:
            self._server = _Server(address, port, text, prometheus_client.CONTENT_TYPE_LATEST)
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: an impossible host name
            raise LaunchError(
                f"--metrics-port must be a free port on an address of this host. Received: port {port}, address "
                f"{address} ({getattr(error, 'strerror', None) or error}). Choose another port, or 0 for any free one."
            ) from None
        # It checks every 0.1 s whether it must end.
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.1], name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"

    def close(self) -> None:
        """Ends the server without waiting for its connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Remembered:
    """Reuses the result of `make` for a moment."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made, self._text = float("-inf"), b""

    def __call__(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._made >= _TEXT_SECONDS:
                self._text = self._make()
                self._made = time.monotonic()
            return self._text


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers at most `_AT_ONCE` connections at a time; closes others at once."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: str, port: int, text: Callable[[], bytes], content_type: str) -> None:
        self.text, self.content_type = text, content_type
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self.address_family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(place[0]), int(place[1])), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except Exception:  # no thread was started that would release it
                self._free.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client hung up or was too slow


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET requests for the metrics. A connection ends after `_CONNECTION_SECONDS` at the latest."""

    server: _Server
    timeout = _CONNECTION_SECONDS  # for each read and write

    def setup(self) -> None:
        # Limits the whole connection, because a client could send a byte now and then to stay.
        self._end = threading.Timer(_CONNECTION_SECONDS, self._hang_up)
        self._end.daemon = True
        self._end.start()
        super().setup()

    def finish(self) -> None:
        self._end.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        text = self.server.text()
        self.send_response(200)
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass
