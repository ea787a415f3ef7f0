"""The code that both interfaces share: looks up a model, calls its process, and records errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_ddl.serving.interfaces.flights import Flight
from keras_ddl.serving.metrics import Metrics, Record
from keras_ddl.serving.model_manager import ModelManager, Version
from keras_ddl.serving.protocol.status import Code, RequestError, timeout_message
from keras_ddl.serving.settings import Options


class Front:
    """Forwards requests to model processes without parsing them."""

    def __init__(self, models: ModelManager, metrics: Metrics, options: Options) -> None:
        self.models, self.metrics, self.stopping = models, metrics, False
        self._timeout = options.timeout

    @property
    def ready(self) -> bool:
        """Whether every model has an available version, for health checks."""
        return not self.stopping and self.models.all_available()

    @contextlib.contextmanager
    def answering(self, record: Record, peer: str) -> Iterator[None]:
        """Records a request that the block answers. Errors are stored in `record`; a client that left is re-raised."""
        try:
            yield
        except RequestError as error:
            # A copy: the traceback of the original keeps the request in memory.
            record.error = RequestError(error.code, error.message, http_status=error.http_status)
        except TimeoutError:
            record.error = RequestError(Code.DEADLINE_EXCEEDED, timeout_message(self._timeout))
        except ConnectionError:
            record.error = RequestError(Code.CANCELLED, "The client has left.")
            raise
        except Exception as error:  # a defect of the server must not take it down
            record.error = RequestError(Code.INTERNAL, f"{type(error).__name__}: {error}")
            self.metrics.log_exception(record, error)
        except BaseException:
            record.error = RequestError(Code.CANCELLED, "The client has left, or its deadline has passed.")
            raise
        finally:
            self.metrics.record_request(record, peer)

    async def forward(
        self, spec: Any, record: Record, flight: Flight, data: bytes | bytearray, encoding: str = "identity"
    ) -> bytes:
        """Returns the response of a version's process.

        Args:
            spec: the ModelSpec.
            data: the request's body.
        Raises: RequestError: there is no such version, or the process returned an error.
        """
        record.model, record.signature = spec.name, spec.signature_name
        with self.models.use(spec.name, *_version_of(spec)) as process:
            record.version = process.version
            fields = {"protocol": record.protocol, "method": record.method, "encoding": encoding}
            flight.compute()
            frame = await process.call(fields, data)
        record.signature = frame.fields.get("signature", record.signature)
        return frame.body

    def check(self, spec: Any, record: Record) -> None:
        """Raises: RequestError: no such version is available."""
        record.model = spec.name
        with self.models.use(spec.name, *_version_of(spec)):
            pass

    def status(self, spec: Any, record: Record) -> list[Version]:
        """Returns the versions that a ModelSpec selects. Raises: RequestError: there are none."""
        record.model = spec.name
        return self.models.status(spec.name, *_version_of(spec))


def _version_of(spec: Any) -> tuple[int | None, str]:
    choice = spec.WhichOneof("version_choice")
    number = spec.version.value if choice == "version" else None
    return number, spec.version_label if choice == "version_label" else ""
