"""The models of a server and their versions: found on disk, loaded, switched to, let go.

One thread polls and loads, so that versions appear in order and loading never competes with itself. A version that is
no longer wanted is let go only when one that is wanted answers, and when the last request that it has begun is
answered.
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

from keras_ddl.checkpoint import durable
from keras_ddl.serving import policies
from keras_ddl.serving.policies import ModelConfig
from keras_ddl.serving.servable import Servable
from keras_ddl.serving.status import Code, RequestError, invalid

LOG = logging.getLogger("keras_ddl.serving")
_RETRY_SECONDS = 60.0
_DRAIN_SECONDS = 30.0


class State(enum.IntEnum):
    """The numbers of tensorflow.serving.ModelVersionStatus.State."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass
class Version:
    """A version and how far it is. `error`: why it could not be loaded."""

    number: int
    state: State = State.START
    error: str = ""
    servable: Servable | None = None
    users: int = 0
    failed_at: float = 0.0


class Models:
    """All models of a server. Its methods may be called from any thread."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        load: Callable[[ModelConfig, Path, int], Servable],
        *,
        poll_seconds: float = 1.0,
    ) -> None:
        """
        Args:
            load: makes a version ready to answer, warmed up; what it raises is the version's error.
            poll_seconds: how often the disk is looked at.
        """
        self._configs = {config.name: config for config in configs}
        self._told_empty: list[ModelConfig] = []
        self._versions: dict[str, dict[int, Version]] = {config.name: {} for config in configs}
        self._load, self._poll_seconds = load, poll_seconds
        self._changed = threading.Condition()
        self._asked = self._done = 0  # rounds over the disk: asked for, and ended
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="keras_ddl-models", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Lets all versions go. Returns whether nothing runs any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        left = [(name, version) for name, versions in self._versions.items() for version in versions.values()]
        freed = [self._unload(name, version, 0.0) for name, version in left]
        return all(freed)

    # ---- what requests ask ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self, name: str, number: int | None = None, label: str = "") -> Iterator[Servable]:
        """Gives a version that answers, and keeps it while it is in use.

        Args:
            number, label: which; by default the highest that answers.
        Raises: RequestError: INVALID_ARGUMENT: no such label, no name; NOT_FOUND: no such model, or no such version
            that answers.
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
            raise invalid("The request has no name of a model (model_spec.name).")
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
            if chosen not in ready:
                which = f"Latest({name})" if number is None else f"Specific({name}, {number})"
                have = (
                    f"versions {sorted(ready)} answer" if name in self._configs else f"models: {sorted(self._configs)}"
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

    def names(self) -> list[str]:
        with self._changed:
            return list(self._configs)

    def all_answer(self) -> bool:
        """Whether every model has a version that answers."""
        with self._changed:
            return all(
                any(version.state == State.AVAILABLE for version in self._versions[name].values())
                for name in self._configs
            )

    # ---- changes -------------------------------------------------------------------------------------------------

    def reload(self, configs: Sequence[ModelConfig], timeout: float) -> None:
        """Serves these models from now on, and waits until the disk was looked at for them.

        Raises: RequestError: FAILED_PRECONDITION: a model's path changes while a version of it answers, a label is of a
            version that does not answer; DEADLINE_EXCEEDED: loading takes longer; the request stands.
        """
        with self._changed:
            for config in configs:
                self._check_labels(config)
            self._configs = {config.name: config for config in configs}
            for config in configs:
                self._versions.setdefault(config.name, {})
        if not self.look(timeout):
            raise RequestError(Code.DEADLINE_EXCEEDED, f"The models were not loaded within {timeout:g} s.")

    def _check_labels(self, config: ModelConfig) -> None:
        """As in TensorFlow Serving, a label moves to a version only once that answers; a new model may have any."""
        known = self._versions.get(config.name)
        if not known:
            return
        for label, number in config.labels.items():
            version = known.get(number)
            if (version is None or version.state != State.AVAILABLE) and self._configs[config.name].labels.get(
                label
            ) != number:
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"Label {label!r} of model {config.name!r} cannot move to version {number}: it does not answer.",
                )

    def look(self, timeout: float) -> bool:
        """Looks at the disk now, and waits for that. Returns whether it was done in time."""
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= wanted or self._stopping, timeout)

    def _loop(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                asked = self._asked
            self._round()
            with self._changed:
                self._done = max(self._done, asked)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping or self._asked > self._done, self._poll_seconds)

    def _round(self) -> None:
        with self._changed:
            configs = dict(self._configs)
        for name, config in configs.items():
            wanted = config.choose(policies.versions_on_disk(config.base_path))
            if not wanted and not self._versions[name] and config not in self._told_empty:
                self._told_empty.append(config)
                LOG.info("model %s: %s has no version to serve yet; waiting for one", name, config.base_path)
            for number in sorted(wanted):
                self._bring_up(config, number)
            self._let_go(name, wanted)
        for name in set(self._versions) - set(configs):
            self._let_go(name, [])
            with self._changed:
                if not self._versions[name] or all(v.state == State.END for v in self._versions[name].values()):
                    del self._versions[name]

    def _bring_up(self, config: ModelConfig, number: int) -> None:
        path = config.base_path / str(number)
        with self._changed:
            version = self._versions[config.name].get(number)
            if version is not None:
                moved = version.servable is not None and version.servable.path != path
                retry = version.error and time.monotonic() - version.failed_at > _RETRY_SECONDS
                gone = version.state == State.END and not version.error
                if not (moved or retry or gone) or self._stopping:
                    return
            if version is not None and version.servable is not None:
                old = version
            else:
                old = None
            version = Version(number, State.LOADING)
            if old is None:
                self._versions[config.name][number] = version
        begin = time.monotonic()
        try:
            with durable.being_read(path):
                version.servable = self._load(config, path, number)
        except Exception as error:  # whatever is wrong with a model, the server lives
            with self._changed:
                version.state, version.failed_at = State.END, time.monotonic()
                version.error = f"{type(error).__name__}: {error}"
            LOG.error("model %s version %d could not be loaded from %s: %s", config.name, number, path, version.error)
            return
        with self._changed:
            version.state = State.AVAILABLE
            self._versions[config.name][number] = version
        LOG.info("model %s version %d answers (loaded in %.2f s)", config.name, number, time.monotonic() - begin)
        if old is not None:
            self._unload(config.name, old)

    def _let_go(self, name: str, wanted: Sequence[int]) -> None:
        with self._changed:
            versions = self._versions[name]
            answers = any(versions[n].state == State.AVAILABLE for n in wanted if n in versions)
            removed = name not in self._configs
            if not answers and not removed and wanted:
                return  # what is wanted does not answer (yet): go on with what does
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
        LOG.info("model %s version %d is let go%s", name, version.number, "" if freed else "; it still computes")
        return freed
