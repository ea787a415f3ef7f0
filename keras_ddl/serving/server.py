"""The server: both interfaces over one model manager, from start to the last response."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from keras_ddl.serving.batching import Batching
from keras_ddl.serving.grpc_interface import GrpcInterface
from keras_ddl.serving.handlers import Handlers
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.rest_interface import RestInterface
from keras_ddl.serving.servable import Servable
from keras_ddl.serving.warm_up import warm_up
from keras_ddl.serving.workers import Workers

LOG = logging.getLogger("keras_ddl.serving")
_HEALTH_SECONDS = 0.2


@dataclass(frozen=True)
class Options:
    """How a server serves; docs/serving.md says what each means to a user."""

    host: str = "0.0.0.0"
    grpc_port: int = 8500
    rest_port: int = 8501
    threads: int = 0
    queue: int = 1000
    batching: Batching | None = None
    message_bytes: int = 64 * 2**20
    timeout: float = 30.0
    poll_seconds: float = 1.0
    drain_seconds: float = 30.0
    config_file: str | None = None
    access_log: TextIO | None = None


class Server:
    """A server of SavedModels in this process. `run` may be called once."""

    def __init__(self, models: Sequence[ModelConfig], options: Options) -> None:
        self._options = options
        self._models = ModelManager(models, self._load, poll_seconds=options.poll_seconds)

    def run(self, started: Callable[[int, int], None] = lambda grpc_port, rest_port: None) -> bool:
        """Serves until SIGTERM or SIGINT, then finishes the running requests.

        Args:
            started: called with the ports, before any model is loaded.
        Returns: whether all ended in time. If not, models are still computing in threads that cannot be stopped and
        that keep the process alive.
        Raises: OSError: a port is taken.
        """
        asyncio.run(self._run(started))
        return self._models.stop()

    def _load(self, config: ModelConfig, path: Path, number: int) -> Servable:
        servable = Servable(path, config.name, number, threads=self._options.threads)
        try:
            replayed = warm_up(servable, self._options.message_bytes)
        except BaseException:
            servable.close()
            raise
        if replayed:
            LOG.info("model %s version %d: %d warm-up requests answered", config.name, number, replayed)
        return servable

    async def _run(self, started: Callable[[int, int], None]) -> None:
        options, stop = self._options, asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        workers = Workers(options.threads or os.cpu_count() or 1, options.queue, options.batching)
        metrics = Metrics(options.access_log)
        handlers = Handlers(self._models, workers, limit_bytes=options.message_bytes)
        grpc_interface = GrpcInterface(handlers, metrics, message_bytes=options.message_bytes)
        rest = RestInterface(
            handlers,
            metrics,
            message_bytes=options.message_bytes,
            timeout=options.timeout,
            drain_seconds=options.drain_seconds,
        )
        try:
            grpc_port = await grpc_interface.start(options.host, options.grpc_port)
            rest_port = await rest.start(options.host, options.rest_port)
            started(grpc_port, rest_port)
            self._models.start()
            healthy = asyncio.create_task(self._show_health(grpc_interface, rest))
            await stop.wait()
            LOG.info("stopping: %d requests are running", workers.busy)
            healthy.cancel()
            rest.show_health(False)
        finally:
            await asyncio.gather(grpc_interface.stop(options.drain_seconds), rest.stop())
            workers.close()

    async def _show_health(self, grpc_interface: GrpcInterface, rest: RestInterface) -> None:
        shown = None
        while True:
            serving = self._models.all_available()
            if serving != shown:
                shown = serving
                await grpc_interface.show_health(serving)
                rest.show_health(serving)
            await asyncio.sleep(_HEALTH_SECONDS)
