"""The models of a server and their versions: found on disk, loaded, switched to, unloaded.

One thread polls and loads, so that versions appear in order and only one is loaded at a time. A stale version is
unloaded only when a wanted one is available and when its own last request has finished. A directory that cannot be
read says nothing: what is loaded stays.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keras_ddl.files import durable
from keras_ddl.serving import model_config
from keras_ddl.serving.model_config import ModelConfig
from keras_ddl.serving.status import Code, RequestError, invalid

LOG = logging.getLogger("keras_ddl.serving")
_DRAIN_SECONDS = 30.0


class Loaded(Protocol):
    """A version that answers. `error`: why it does so no more."""

    path: Path
    version: int
    error: str

    def close(self, seconds: float) -> bool:
        """Ends it, after so many seconds at the latest. Returns whether all requests were done."""


class State(enum.IntEnum):
    """The numbers of tensorflow.serving.ModelVersionStatus.State."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass
class Version:
    """A version and its state. `error`: why it could not be loaded."""

    number: int
    state: State = State.START
    error: str = ""
    servable: Loaded | None = None
    users: int = 0
    failed_at: float = 0.0
    failures: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns it as a ModelVersionStatus."""
        status = {"error_code": "UNKNOWN" if self.error else "OK", "error_message": self.error}
        return {"version": str(self.number), "state": self.state.name, "status": status}


class ModelManager:
    """All models of a server. Its methods may be called from any thread."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        load: Callable[[ModelConfig, Path, int], Loaded],
        *,
        poll_seconds: float = 1.0,
        retries: int | None = None,
        retry_seconds: float = 60.0,
        allow_any_labels: bool = False,
    ) -> None:
        """
        Args:
            load: loads a version and warms it up; an exception becomes the version's error.
            poll_seconds: interval between polls of the disk.
            retries: how often a version that could not be loaded is tried again; None: for ever.
            retry_seconds: how long to wait before.
            allow_any_labels: labels may move to versions that are not available.
        """
        self._configs = {config.name: config for config in configs}
        self._reported_empty: list[ModelConfig] = []
        self._unreadable: dict[str, str] = {}  # model -> what was last said of its directory
        self._versions: dict[str, dict[int, Version]] = {config.name: {} for config in configs}
        self._load, self._poll_seconds = load, poll_seconds
        self._retries, self._retry_seconds, self._allow_any_labels = retries, retry_seconds, allow_any_labels
        self._changed = threading.Condition()
        self._polls_requested = self._polls_done = 0  # polls of the disk: requested, and finished
        self._stopping = self._has_polled = False
        self._thread = threading.Thread(target=self._loop, name="keras_ddl-models", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Unloads all versions. Returns whether nothing is running any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        left = [(name, version) for name, versions in self._versions.items() for version in versions.values()]
        freed = [self._unload(name, version, 0.0) for name, version in left]
        return all(freed)

    # ---- for requests --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self, name: str, number: int | None = None, label: str = "") -> Iterator[Loaded]:
        """Yields an available version, and keeps it loaded while it is in use.

        Args:
            number, label: which one; by default the highest available.
        Raises: RequestError: INVALID_ARGUMENT: no such label, no name; UNAVAILABLE: the first models are being loaded;
            NOT_FOUND: no such model, or no such version that answers.
        """
        version = self._acquire(name, number, label)
        try:
            assert version.servable is not None
            yield version.servable
        finally:
            with self._changed:
                version.users -= 1
                if not version.users:
                    self._changed.notify_all()

    def _acquire(self, name: str, number: int | None, label: str) -> Version:
        if not name:
            raise invalid("The request does not name a model (model_spec.name).")
        with self._changed:
            if label:
                labels = self._configs[name].labels if name in self._configs else {}
                if label not in labels:
                    raise invalid(f"Unrecognized servable version label: {label}. There are {sorted(labels)}.")
                number = labels[label]
            ready = {
                each.number: each for each in self._versions.get(name, {}).values() if each.state == State.AVAILABLE
            }
            chosen = (max(ready) if ready else None) if number is None else number
            if chosen not in ready and not self._has_polled:
                raise RequestError(Code.UNAVAILABLE, "The models are being loaded. Try again later.")
            if chosen not in ready:
                which = f"Latest({name})" if number is None else f"Specific({name}, {number})"
                have = (
                    f"available versions: {sorted(ready)}"
                    if name in self._configs
                    else f"models: {sorted(self._configs)}"
                )
                raise RequestError(Code.NOT_FOUND, f"Servable not found for request: {which}; {have}")
            ready[chosen].users += 1
            return ready[chosen]

    def status(self, name: str, number: int | None = None, label: str = "") -> list[Version]:
        """Returns copies of a model's versions, highest first. Raises: RequestError: as `use`."""
        with self._changed:
            if name not in self._configs:
                raise RequestError(Code.NOT_FOUND, f"Could not find any versions of model {name}")
            if label:
                if label not in self._configs[name].labels:
                    raise invalid(f"Unrecognized servable version label: {label}.")
                number = self._configs[name].labels[label]
            versions = [each for each in self._versions[name].values() if number in (None, each.number)]
            if number is not None and not versions:
                raise RequestError(Code.NOT_FOUND, f"Could not find version {number} of model {name}")
            return sorted((Version(v.number, v.state, v.error) for v in versions), key=lambda v: -v.number)

    def all_available(self) -> bool:
        """Whether every model has an available version."""
        with self._changed:
            return all(
                any(version.state == State.AVAILABLE for version in self._versions[name].values())
                for name in self._configs
            )

    # ---- changes -------------------------------------------------------------------------------------------------

    def reload(self, configs: Sequence[ModelConfig], timeout: float) -> RequestError | None:
        """Serves these models from now on, and waits until the disk has been polled for them.

        Returns: the error of a model of which no version could be loaded; the request stands.
        Raises: RequestError: FAILED_PRECONDITION: a label is of a version that does not answer; DEADLINE_EXCEEDED:
            loading takes longer; the request stands.
        """
        with self._changed:
            for config in configs:
                self._check_labels(config)
            self._configs = {config.name: config for config in configs}
            for config in configs:
                self._versions.setdefault(config.name, {})
        if not self.poll_now(timeout):
            raise RequestError(Code.DEADLINE_EXCEEDED, f"The models were not loaded within {timeout:g} s.")
        with self._changed:
            for config in configs:
                versions = self._versions.get(config.name, {}).values()
                if not any(each.state == State.AVAILABLE for each in versions):
                    errors = "; ".join(each.error for each in versions if each.error)
                    return RequestError(
                        Code.INTERNAL,
                        f"Model {config.name!r} is not available: {errors or f'no versions in {config.base_path}'}.",
                    )
        return None

    def _check_labels(self, config: ModelConfig) -> None:
        """As in TensorFlow Serving, a label moves to a version only once that answers; a new model may have any."""
        known = self._versions.get(config.name)
        if not known or self._allow_any_labels:
            return
        for label, number in config.labels.items():
            version = known.get(number)
            if (version is None or version.state != State.AVAILABLE) and self._configs[config.name].labels.get(
                label
            ) != number:
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"Label {label!r} of model {config.name!r} cannot move to version {number}: that version is not "
                    "available.",
                )

    def poll_now(self, timeout: float) -> bool:
        """Polls the disk now, and waits for that. Returns whether it finished in time."""
        with self._changed:
            self._polls_requested += 1
            wanted = self._polls_requested
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._polls_done >= wanted or self._stopping, timeout)

    def _loop(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                requested = self._polls_requested
            self._poll()
            with self._changed:
                self._has_polled = True
                self._polls_done = max(self._polls_done, requested)
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._stopping or self._polls_requested > self._polls_done, self._poll_seconds
                )

    def _poll(self) -> None:
        with self._changed:
            configs = dict(self._configs)
        for name, config in configs.items():
            self._notice_ends(config)
            try:
                on_disk = model_config.versions_on_disk(config.base_path)
            except OSError as error:
                if self._unreadable.get(name) != str(error):
                    self._unreadable[name] = str(error)
                    LOG.error("model %s: its directory cannot be read; what is loaded stays: %s", name, error)
                continue
            self._unreadable.pop(name, None)
            wanted = config.choose(list(on_disk))
            if not wanted and not self._versions[name] and config not in self._reported_empty:
                self._reported_empty.append(config)
                LOG.info("model %s: %s has no version to serve yet; waiting for one", name, config.base_path)
            for number in sorted(wanted):
                self._load_version(config, number, on_disk[number])
            self._unload_stale(name, wanted)
        for name in set(self._versions) - set(configs):
            self._unload_stale(name, [])
            with self._changed:
                if not self._versions[name] or all(v.state == State.END for v in self._versions[name].values()):
                    del self._versions[name]

    def _notice_ends(self, config: ModelConfig) -> None:
        """Takes out versions that answered and can do so no more; they are tried again as any that failed."""
        with self._changed:
            for version in self._versions[config.name].values():
                if version.servable is not None and version.servable.error:
                    version.state, version.failed_at = State.END, time.monotonic()
                    version.error, version.servable = version.servable.error, None
                    version.failures += 1

    def _load_version(self, config: ModelConfig, number: int, path: Path) -> None:
        with self._changed:
            version = self._versions[config.name].get(number)
            if version is not None:
                moved = version.servable is not None and version.servable.path != path
                retry = (
                    version.error
                    and (self._retries is None or version.failures <= self._retries)
                    and time.monotonic() - version.failed_at > self._retry_seconds
                )
                gone = version.state == State.END and not version.error
                if not (moved or retry or gone) or self._stopping:
                    return
            if version is not None and version.servable is not None:
                old = version
            else:
                old = None
            version = Version(number, State.LOADING, failures=version.failures if version is not None else 0)
            if old is None:
                self._versions[config.name][number] = version
        begin = time.monotonic()
        try:
            with durable.being_read(path):
                version.servable = self._load(config, path, number)
        except Exception as error:  # whatever is wrong with a model, the server keeps running
            with self._changed:
                version.state, version.failed_at = State.END, time.monotonic()
                version.error = f"{type(error).__name__}: {error}"
                version.failures += 1
            LOG.error("model %s version %d could not be loaded from %s: %s", config.name, number, path, version.error)
            return
        with self._changed:
            version.state = State.AVAILABLE
            self._versions[config.name][number] = version
        LOG.info("model %s version %d available (loaded in %.2f s)", config.name, number, time.monotonic() - begin)
        if old is not None:
            self._unload(config.name, old)

    def _unload_stale(self, name: str, wanted: Sequence[int]) -> None:
        with self._changed:
            versions = self._versions[name]
            available = any(versions[n].state == State.AVAILABLE for n in wanted if n in versions)
            removed = name not in self._configs
            if not available and not removed and wanted:
                return  # nothing wanted is available (yet): keep what is
            leaving = [v for v in versions.values() if v.number not in wanted and v.state != State.END]
        for version in leaving:
            self._unload(name, version)

    def _unload(self, name: str, version: Version, seconds: float = _DRAIN_SECONDS) -> bool:
        with self._changed:
            if version.servable is None:
                return True
            version.state = State.UNLOADING
            self._changed.wait_for(lambda: not version.users, seconds)
            servable, version.servable = version.servable, None
            version.state = State.END
        freed = servable.close(seconds)
        LOG.info("model %s version %d unloaded%s", name, version.number, "" if freed else "; it is still computing")
        return freed
