"""The server: both interfaces over one model manager, from start to the last response."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from keras_ddl.errors import ConfigError
from keras_ddl.serving import model_config
from keras_ddl.serving.batching import Batching
from keras_ddl.serving.grpc_interface import GrpcInterface
from keras_ddl.serving.handlers import Handlers
from keras_ddl.serving.json_processes import JsonProcesses
from keras_ddl.serving.limits import MEGABYTE, Memory, give_back_memory
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.reading_turns import turns_and_memory
from keras_ddl.serving.rest_interface import METRICS_PATH, RestInterface
from keras_ddl.serving.servable import Servable
from keras_ddl.serving.status import RequestError
from keras_ddl.serving.tls import Tls
from keras_ddl.serving.warm_up import warm_up
from keras_ddl.serving.workers import Workers

LOG = logging.getLogger("keras_ddl.serving")
_HEALTH_SECONDS = 0.2
_JSON_PROCESSES = 2
_SWITCH_SECONDS = 0.001  # after which a thread lets the event loop go on
_RELOAD_SECONDS = 600.0
_MOST_CALLS = 4096  # over gRPC at the same time


@dataclass(frozen=True)
class Options:
    """How a server serves; docs/serving.md says what each means to a user."""

    host: str = "127.0.0.1"
    grpc_port: int = 8500
    rest_port: int = 8501
    threads: int = 0
    queue: int = 1000
    batching: Batching | None = None
    message_bytes: int = 64 * MEGABYTE
    memory_bytes: int = 1024 * MEGABYTE
    timeout: float = 30.0
    idle_seconds: float = 75.0
    poll_seconds: float = 1.0
    drain_seconds: float = 30.0
    access_log: TextIO | None = None
    grpc_socket: str | None = None
    grpc_options: tuple[tuple[str, Any], ...] = ()
    tls: Tls | None = None
    cors: bool = False
    metrics_path: str | None = METRICS_PATH
    allow_reload: bool = False
    as_tensor_content: bool = False
    check_method_names: bool = False
    allow_any_labels: bool = False
    warm_up: bool = True
    warm_up_rounds: int = 1
    config_file: str | None = None
    config_poll_seconds: float = 0.0
    load_retries: int | None = None
    retry_seconds: float = 60.0
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    gpu_memory_fraction: float = 0.0
    tags: tuple[str, ...] = ("serve",)


class Server:
    """A server of SavedModels in this process. `run` may be called once."""

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
        options = self._options
        servable = Servable(
            path,
            config.name,
            number,
            intra_op_threads=options.intra_op_threads or options.threads,
            inter_op_threads=options.inter_op_threads or options.threads,
            gpu_memory_fraction=options.gpu_memory_fraction,
            tags=options.tags,
        )
        try:
            rounds = options.warm_up_rounds if options.warm_up else 0
            replayed = sum(warm_up(servable, options.message_bytes) for _ in range(rounds))
        except BaseException:
            servable.close()
            raise
        if replayed:
            LOG.info("model %s version %d: %d warm-up requests answered", config.name, number, replayed)
        return servable

    async def _run(self, started: Callable[[int, int], None]) -> None:
        options, stop = self._options, asyncio.Event()
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.freeze()  # what is imported stays: to look through it again and again would hold up requests
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        workers = Workers(options.threads or os.cpu_count() or 1, options.queue, options.batching)
        metrics = Metrics(options.access_log)
        turns, memory = turns_and_memory(options.memory_bytes, options.message_bytes, options.timeout)
        processes = JsonProcesses(_JSON_PROCESSES, options.message_bytes)
        handlers = Handlers(
            self._models,
            workers,
            message_bytes=options.message_bytes,
            as_content=options.as_tensor_content,
            check_method_names=options.check_method_names,
            allow_reload=options.allow_reload,
        )
        grpc_interface = GrpcInterface(
            handlers,
            metrics,
            memory,
            turns,
            message_bytes=options.message_bytes,
            max_calls=_MOST_CALLS,
            options=options.grpc_options,
        )
        rest = RestInterface(
            handlers,
            metrics,
            memory,
            processes,
            message_bytes=options.message_bytes,
            timeout=options.timeout,
            drain_seconds=options.drain_seconds,
            idle_seconds=options.idle_seconds,
            cors=options.cors,
            metrics_path=options.metrics_path,
        )
        try:
            grpc_port = await self._listen(grpc_interface)
            context = options.tls.context() if options.tls is not None else None
            rest_port = await rest.start(options.host, options.rest_port, context)
            started(grpc_port, rest_port)
            self._models.start()
            tasks = [asyncio.create_task(self._show_health(grpc_interface, rest, memory))]
            if options.config_file is not None and options.config_poll_seconds > 0:
                tasks.append(asyncio.create_task(self._follow_config(options.config_file)))
            await stop.wait()
            LOG.info("stopping: %d requests are running", workers.busy)
            for task in tasks:
                task.cancel()
            rest.show_health(False)
        finally:
            await asyncio.gather(grpc_interface.stop(options.drain_seconds), rest.stop())
            workers.close()
            await processes.close()

    async def _listen(self, grpc_interface: GrpcInterface) -> int:
        options = self._options
        addresses = [f"{options.host}:{options.grpc_port}"]
        if options.grpc_socket is not None:
            addresses.append(f"unix:{options.grpc_socket}")
        credentials = options.tls.credentials() if options.tls is not None else None
        return (await grpc_interface.start(addresses, credentials))[0]

    async def _show_health(self, grpc_interface: GrpcInterface, rest: RestInterface, memory: Memory) -> None:
        shown = None
        while True:
            serving = self._models.all_available()
            if serving != shown:
                shown = serving
                await grpc_interface.show_health(serving)
                rest.show_health(serving)
            if memory.has_leftovers():
                await asyncio.to_thread(give_back_memory)
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _follow_config(self, path: str) -> None:
        """Serves what the model config file says, also when it changes; one that is wrong changes nothing."""
        known = said = None
        while True:
            await asyncio.sleep(self._options.config_poll_seconds)
            try:
                text = Path(path).read_bytes()
                if text == known:
                    continue
                known = text  # for the first time, too: it may have changed since the server began
                configs = model_config.read_file(path)
                if not configs:  # perhaps it is being written
                    raise ConfigError("It names no model. Those that are served stay.")
                error = await asyncio.to_thread(self._models.reload, configs, _RELOAD_SECONDS)
            except RequestError as later:  # such as a label of a version that is yet to come: the next poll tries again
                error, known = later, None
            except (OSError, ConfigError) as wrong:
                error = wrong
            if error is not None and str(error) != said:
                LOG.error("model config file %s: %s", path, error)
            said = None if error is None else str(error)
