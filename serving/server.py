"""Runs the server: both interfaces and the models, from start to the last response.

This process does not parse or compute requests: it reads bytes, forwards them to the process of a model version, and
writes its bytes back. It imports no TensorFlow.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_ddl.errors import ConfigError
from keras_ddl.serving import model_config
from keras_ddl.serving.interfaces.connections import connections
from keras_ddl.serving.interfaces.flights import Flights
from keras_ddl.serving.interfaces.front import Front
from keras_ddl.serving.interfaces.grpc_interface import GrpcInterface
from keras_ddl.serving.interfaces.health import HealthPort
from keras_ddl.serving.interfaces.rest_interface import RestInterface
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.processes.forked import ForkServer
from keras_ddl.serving.processes.model_process import ModelProcess
from keras_ddl.serving.protocol.status import RequestError
from keras_ddl.serving.settings import Options

LOG = logging.getLogger("keras_ddl.serving")
_HEALTH_SECONDS = 0.2
_RELOAD_SECONDS = 600.0


class Server:
    """A server of SavedModels. `run` may be called once."""

    def __init__(self, models: Sequence[ModelConfig], options: Options) -> None:
        self._options = options
        self._models = ModelManager(
            models,
            self._load,
            poll_seconds=options.poll_seconds,
            retries=options.load_retries,
            retry_seconds=options.retry_seconds,
            allow_any_labels=options.allow_any_labels,
        )
        self._fork_server, self._reported = ForkServer(options.modules), ""

    def run(self, started: Callable[[int, int, int | None], None] = lambda *ports: None) -> bool:
        """Serves until SIGTERM or SIGINT, then finishes the running requests.

        Args:
            started: called with the ports of gRPC, REST and health (None: no health port), before models are loaded.
        Returns: whether all requests ended in time. The rest are abandoned.
        Raises: OSError: a port is in use.
        """
        return asyncio.run(self._run(started))

    async def _load(self, config: ModelConfig, path: Path, number: int) -> ModelProcess:
        process = ModelProcess(self._fork_server, config.name, number, path, self._options)
        await process.start()
        if process.warmed_up:
            LOG.info("version %d of model %r: %d warm-up requests answered", number, config.name, process.warmed_up)
        return process

    async def _run(self, started: Callable[[int, int, int | None], None]) -> bool:
        """Serves until a signal arrives, then drains. Returns whether all requests were answered."""
        options, stop = self._options, asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._report)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        most = connections()
        gc.freeze()  # the garbage collector need not traverse imported modules again
        flights, front = (
            Flights(options.memory_bytes, options.timeout),
            Front(self._models, Metrics(options.access_log), options),
        )
        grpc_interface = GrpcInterface(front, flights, options, most)
        rest = RestInterface(front, flights, options, most)
        health = HealthPort(options.host, options.health_port) if options.health_port is not None else None
        shown = asyncio.create_task(_show_health(front, health)) if health is not None else None
        all_done = True
        try:
            grpc_port = await self._listen(grpc_interface)
            rest_port = await rest.start(options.host, options.rest_port)
            started(grpc_port, rest_port, health.port if health is not None else None)
            tasks = [asyncio.create_task(each) for each in (flights.watch(), self._models.follow())]
            if options.config_file is not None and options.config_poll_seconds > 0:
                tasks.append(asyncio.create_task(self._follow_config(options.config_file)))
            await stop.wait()
            LOG.info("stopping: %d requests are running", self._models.busy)
            front.stopping = True
            for task in tasks:
                task.cancel()
        finally:
            await asyncio.gather(grpc_interface.stop(options.drain_seconds), rest.stop())
            all_done = not self._models.busy
            self._models.close()
            self._fork_server.close()
            if health is not None and shown is not None:
                shown.cancel()
                health.close()
        return all_done

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs errors of asyncio. An OSError (no free descriptors) is logged once, because asyncio repeats it."""
        error = context.get("exception")
        if not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif str(error) != self._reported:
            self._reported = str(error)
            LOG.error("%s: %s", context["message"], error)

    async def _listen(self, grpc_interface: GrpcInterface) -> int:
        options = self._options
        addresses = [f"{options.host}:{options.grpc_port}"]
        if options.grpc_socket is not None:
            addresses.append(f"unix:{options.grpc_socket}")
        return (await grpc_interface.start(addresses))[0]

    async def _follow_config(self, path: str) -> None:
        """Reloads the model config file when it changes. An invalid file changes nothing."""
        known: bytes | None = None
        logged: str | None = None
        while True:
            error: Exception | None
            await asyncio.sleep(self._options.config_poll_seconds)
            try:
                text = Path(path).read_bytes()
                if text == known:
                    continue
                known = text  # also read the first time, because it may have changed since the server began
                configs = model_config.read_file(path)
                if not configs:  # the file may be half written
                    raise ConfigError("It must name a model. The served models stay.")
                error = await self._models.reload(configs, _RELOAD_SECONDS)
            except RequestError as temporary:  # e.g. a label's version is not loaded yet; the next poll retries
                error, known = temporary, None
            except (OSError, ConfigError) as invalid:
                error = invalid
            if error is not None and str(error) != logged:
                LOG.error("model config file %s: %s", path, error)
            logged = None if error is None else str(error)


async def _show_health(front: Front, health: HealthPort) -> None:
    while True:
        health.show(front.ready)
        await asyncio.sleep(_HEALTH_SECONDS)
