"""Manages the models of a server: polls the disk for versions, loads new ones, and unloads stale ones.

One task polls and loads, so that versions appear in order and only one is loaded at a time. A stale version is unloaded
only when a wanted one is available and its own last request has finished. If a directory cannot be read, loaded
versions stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.files import durable, foreign
from keras_ddl.serving import model_config
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.processes.model_process import LoadInterrupted, ModelProcess
from keras_ddl.serving.protocol.status import Code, RequestError, invalid

LOG = logging.getLogger("keras_ddl.serving")
_DRAIN_SECONDS, _LOOK_SECONDS = 30.0, 0.05
_RETRY_SECONDS = 0.25  # pause before a killed load is retried; doubled each time


class State(enum.IntEnum):
    """The numbers of tensorflow.serving.ModelVersionStatus.State."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass
class Version:
    """A version and its state.

    Attributes:
        error: why it could not be loaded. In state LOADING the server will soon try again.
        retry_at: when to try again, by time.monotonic.
    """

    number: int
    state: State = State.START
    error: str = ""
    servable: ModelProcess | None = None
    users: int = 0
    retry_at: float = 0.0
    failures: int = 0

    @property
    def is_available(self) -> bool:
        """Whether the version answers, or its process has just ended and is being restarted."""
        return self.state == State.AVAILABLE and self.servable is not None and not self.servable.error

    @property
    def is_coming(self) -> bool:
        """Whether the version will answer later: it is being loaded, or was interrupted. A broken version will not."""
        return self.state in (State.START, State.LOADING, State.AVAILABLE)

    def failed(self, state: State, error: str, wait: float) -> None:
        """Marks the version as not loaded because of `error`. The server tries again after `wait` seconds."""
        self.state, self.error, self.servable = state, error, None
        self.retry_at = time.monotonic() + wait
        self.failures += 1

    def shown(self) -> Version:
        """Returns the version in the form for clients: with the error of a process that cannot be restarted."""
        if self.servable is None or not self.servable.error:
            return self
        return dataclasses.replace(self, state=State.LOADING, error=self.servable.error)

    def as_json(self) -> dict[str, Any]:
        status = {"error_code": "UNKNOWN" if self.error else "OK", "error_message": self.error}
        return {"version": str(self.number), "state": self.state.name, "status": status}


class ModelManager:
    """All models of a server. On the event loop only."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        load: Callable[[ModelConfig, Path, int], Awaitable[ModelProcess]],
        *,
        poll_seconds: float = 1.0,
        retries: int | None = None,
        retry_seconds: float = 60.0,
        allow_any_labels: bool = False,
    ) -> None:
        """Knows the models of `configs`; loads none until `follow` or `poll` is called.

        Args:
            load: loads a version and warms it up; an exception becomes the version's error.
            poll_seconds: interval between polls of the disk.
            retries: how often to retry a version that could not be loaded; None: no limit.
            retry_seconds: how long to wait before a retry.
            allow_any_labels: labels may move to versions that are not available.
        """
        self._configs = {config.name: config for config in configs}
        self._warned: dict[str, str] = {}  # model -> the last warning about its directory
        self._wrong: dict[str, dict[int, str]] = {}  # model -> version -> why it could not be read
        self._versions: dict[str, dict[int, Version]] = {config.name: {} for config in configs}
        self._load, self._poll_seconds = load, poll_seconds
        self._retries, self._retry_seconds, self._allow_any_labels = retries, retry_seconds, allow_any_labels
        self._polling, self._polled = asyncio.Lock(), set[str]()  # models whose directories have been read

    async def follow(self) -> None:
        """Polls the disk until it is cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._poll_seconds)

    @property
    def busy(self) -> int:
        return sum(each.busy for each in self._servables())

    def close(self) -> None:
        """Ends all versions, without waiting for their requests."""
        for each in self._servables():
            each.close()

    def _servables(self) -> list[ModelProcess]:
        versions = [version for versions in self._versions.values() for version in versions.values()]
        return [version.servable for version in versions if version.servable is not None]

    # ---- for requests --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self, name: str, number: int | None = None, label: str = "") -> Iterator[ModelProcess]:
        """Yields an available version, and keeps it loaded while it is in use.

        Args:
            number, label: the wanted version; default: the highest available.
        Raises: RequestError: INVALID_ARGUMENT: unknown label, or no name; UNAVAILABLE: the version is on disk but not
            loaded now, or the disk has not been read yet; NOT_FOUND: no such model or version.
        """
        version = self._chosen(name, number, label)
        assert version.servable is not None
        version.users += 1
        try:
            yield version.servable
        finally:
            version.users -= 1

    def _chosen(self, name: str, number: int | None, label: str) -> Version:
        if not name:
            raise invalid("The request does not name a model (model_spec.name).")
        if label:
            number = self._labelled(name, label)
        versions = self._versions.get(name, {})
        ready = {each.number: each for each in versions.values() if each.is_available}
        chosen = (max(ready) if ready else None) if number is None else number
        if chosen in ready:
            return ready[chosen]
        if name in self._configs and name not in self._polled:
            raise RequestError(Code.UNAVAILABLE, f"Model {name!r} is being loaded. Try again later.")
        coming = [each for each in versions.values() if each.is_coming and number in (None, each.number)]
        if coming:
            last = max(coming, key=lambda each: each.number).shown()
            why = f" It could not be loaded: {last.error.rstrip('.')}." if last.error else ""
            raise RequestError(
                Code.UNAVAILABLE, f"Version {last.number} of model {name!r} is not available yet.{why} Try again later."
            )
        which = f"Latest({name})" if number is None else f"Specific({name}, {number})"
        have = f"available versions: {sorted(ready)}" if name in self._configs else f"models: {sorted(self._configs)}"
        raise RequestError(Code.NOT_FOUND, f"Servable not found for request: {which}; {have}")

    def _labelled(self, name: str, label: str) -> int:
        labels = self._configs[name].labels if name in self._configs else {}
        if label not in labels:
            raise invalid(f"Unrecognized servable version label: {label}. There are {sorted(labels)}.")
        return labels[label]

    def status(self, name: str, number: int | None = None, label: str = "") -> list[Version]:
        """Returns a model's versions, highest first. Raises: RequestError: as `use`."""
        if name not in self._configs:
            raise RequestError(Code.NOT_FOUND, f"Could not find any versions of model {name}")
        if label:
            number = self._labelled(name, label)
        versions = [each.shown() for each in self._versions[name].values() if number in (None, each.number)]
        if number is not None and not versions:
            raise RequestError(Code.NOT_FOUND, f"Could not find version {number} of model {name}")
        return sorted(versions, key=lambda version: -version.number)

    def all_available(self) -> bool:
        return all(self._is_available(name) for name in self._configs)

    def _is_available(self, name: str) -> bool:
        return any(version.is_available for version in self._versions[name].values())

    # ---- changes -------------------------------------------------------------------------------------------------

    async def reload(self, configs: Sequence[ModelConfig], timeout: float) -> RequestError | None:
        """Serves these models from now on, and waits until the disk has been polled for them.

        Returns: the error of a model without an available version; the new list stays in effect.
        Raises: RequestError: FAILED_PRECONDITION: a label names a version that is not available; DEADLINE_EXCEEDED:
            loading takes longer; the new list stays in effect.
        """
        for config in configs:
            self._check_labels(config)
        self._configs = {config.name: config for config in configs}
        for config in configs:
            self._versions.setdefault(config.name, {})
        try:
            await asyncio.wait_for(asyncio.shield(self.poll()), timeout)
        except TimeoutError:
            raise RequestError(Code.DEADLINE_EXCEEDED, f"The models were not loaded within {timeout:g} s.") from None
        for config in configs:
            if config.name in self._versions and not self._is_available(config.name):
                errors = "; ".join(each.error for each in self._versions[config.name].values() if each.error)
                return RequestError(
                    Code.INTERNAL,
                    f"Model {config.name!r} is not available: {errors or f'no versions in {config.base_path}'}.",
                )
        return None

    def _check_labels(self, config: ModelConfig) -> None:
        """Checks, as TensorFlow Serving does, that labels move only to available versions. A new model may have any."""
        known = self._versions.get(config.name)
        if not known or self._allow_any_labels:
            return
        before = self._configs[config.name].labels if config.name in self._configs else {}
        for label, number in config.labels.items():
            is_available = number in known and known[number].is_available
            if not is_available and before.get(label) != number:
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"Label {label!r} of model {config.name!r} cannot move to version {number}: that version is not "
                    "available.",
                )

    async def poll(self) -> None:
        """Reads the disk, loads new versions, and unloads stale ones."""
        async with self._polling:
            for name, config in list(self._configs.items()):
                await self._poll_one(name, config)
            for name in set(self._versions) - set(self._configs):
                await self._unload_stale(name, [])
                if name not in self._configs:
                    del self._versions[name]
                    self._polled.discard(name)

    async def _poll_one(self, name: str, config: ModelConfig) -> None:
        """Compares the versions of a model on disk with the loaded ones, then loads and unloads what differs."""
        versions = self._versions[name]
        try:
            on_disk, wrong = await asyncio.to_thread(model_config.versions_on_disk, config.base_path)
        except OSError as error:
            self._warn(name, f"its directory cannot be read; loaded versions stay: {error}")
            self._polled.add(name)
            return
        for number in wrong:
            loaded = versions.get(number)
            if loaded is not None and loaded.servable is not None:
                on_disk[number] = loaded.servable.path  # stays loaded
        self._warn_of_versions(name, wrong)
        wanted = config.choose(list(on_disk))
        if wanted or versions:
            self._warned.pop(name, None)
        else:
            self._warn(name, f"{config.base_path} has no version to serve yet; waiting for one")
        for version in versions.values():
            if version.number not in wanted and version.servable is None:
                version.state, version.error = State.END, ""  # deleted or no longer wanted
        for number in sorted(wanted):
            if self._is_to_be_loaded(versions.get(number), on_disk[number]):
                await self._load_version(config, number, on_disk[number])
        self._polled.add(name)
        await self._unload_stale(name, wanted)

    def _warn(self, name: str, text: str) -> None:
        if self._warned.get(name) != text:  # once, not at each poll
            self._warned[name] = text
            LOG.warning("model %s: %s", name, text)

    def _warn_of_versions(self, name: str, wrong: Mapping[int, str]) -> None:
        """Warns once about each version that cannot be read. The other versions are served."""
        before = self._wrong.get(name, {})
        for number, text in wrong.items():
            if before.get(number) != text:
                LOG.warning("model %s: version %d is skipped: %s", name, number, text)
        self._wrong[name] = dict(wrong)

    def _is_to_be_loaded(self, version: Version | None, path: Path) -> bool:
        if version is None:
            return True
        if version.servable is not None:
            return version.servable.path != path  # the directory has moved
        if not version.error:
            return version.state == State.END
        may_retry = self._retries is None or version.failures <= self._retries
        return may_retry and time.monotonic() > version.retry_at

    async def _load_version(self, config: ModelConfig, number: int, path: Path) -> None:
        """Loads a version, then unloads the old one of the same number. After a failure, a later poll may try again."""
        versions = self._versions[config.name]
        before = versions.get(number)
        version = Version(number, State.LOADING, failures=before.failures if before is not None else 0)
        old = before if before is not None and before.servable is not None else None
        if old is None:
            versions[number] = version
        begin = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                await asyncio.to_thread(stack.enter_context, durable.being_read(path))  # keeps exports from removing it
                await asyncio.to_thread(foreign.check_opens, path)  # because TensorFlow would wait for a FIFO's writer
                version.servable = await self._load(config, path, number)
        except Exception as error:  # a broken model must not stop the server
            state, wait = State.END, self._retry_seconds
            if isinstance(error, (LoadInterrupted, OSError)):  # may not be the model's fault
                state, wait = State.LOADING, min(wait, _RETRY_SECONDS * 2**version.failures)
            version.failed(state, f"{type(error).__name__}: {error}", wait)
            LOG.error(
                "version %d of model %r could not be loaded from %s: %s", number, config.name, path, version.error
            )
            return
        version.state = State.AVAILABLE
        versions[number] = version
        LOG.info("version %d of model %r available (loaded in %.2f s)", number, config.name, time.monotonic() - begin)
        if old is not None:
            await self._unload(config.name, old)

    async def _unload_stale(self, name: str, wanted: Sequence[int]) -> None:
        versions = self._versions[name]
        available = any(versions[number].is_available for number in wanted if number in versions)
        if wanted and not available and name in self._configs:
            return  # no wanted version is available yet: keep the old ones
        for version in list(versions.values()):
            if version.number not in wanted and version.servable is not None:
                await self._unload(name, version)

    async def _unload(self, name: str, version: Version) -> None:
        version.state = State.UNLOADING
        latest = time.monotonic() + _DRAIN_SECONDS
        while version.users and time.monotonic() < latest:
            await asyncio.sleep(_LOOK_SECONDS)
        assert version.servable is not None
        freed = version.servable.close()
        version.servable, version.state = None, State.END
        LOG.info("version %d of model %r unloaded%s", version.number, name, "" if freed else "; it was still computing")
