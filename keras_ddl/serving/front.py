"""What both interfaces ask: the look-up of a model, and the call of its process."""

from __future__ import annotations

from typing import Any

from keras_ddl.serving.flights import Flight
from keras_ddl.serving.metrics import Record
from keras_ddl.serving.model_manager import ModelManager, Version


class Front:
    """Passes requests on. It looks at none of them."""

    def __init__(self, models: ModelManager) -> None:
        self.models, self.stopping = models, False

    @property
    def ready(self) -> bool:
        """Whether every model can be asked, as health has it."""
        return not self.stopping and self.models.all_available()

    async def ask(
        self, spec: Any, record: Record, flight: Flight, data: bytes | bytearray, encoding: str = "identity"
    ) -> bytes:
        """Returns what the process of a version answers.

        Args:
            spec: the ModelSpec.
            data: the request's body.
        Raises: RequestError: there is no such version; what the process answers.
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
        """Raises: RequestError: there is no version that could be asked."""
        record.model = spec.name
        with self.models.use(spec.name, *_version_of(spec)):
            pass

    def status(self, spec: Any, record: Record) -> list[Version]:
        """Returns the versions that a ModelSpec names. Raises: RequestError: there are none."""
        record.model = spec.name
        return self.models.status(spec.name, *_version_of(spec))


def _version_of(spec: Any) -> tuple[int | None, str]:
    choice = spec.WhichOneof("version_choice")
    number = spec.version.value if choice == "version" else None
    return number, spec.version_label if choice == "version_label" else ""
