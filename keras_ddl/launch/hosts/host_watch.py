"""Notices changes of the available hosts: the launcher polls the script or file that names them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from keras_ddl.errors import LaunchError
from keras_ddl.launch.hosts import Host
from keras_ddl.launch.hosts.placement import Discovery, HostFile

_POLL_SECONDS = 2.0


class HostWatch:
    """Polls a script or a file in a thread, inside a `with` block. A change counts after two equal answers."""

    def __init__(
        self,
        source: Discovery | HostFile,
        differs: Callable[[tuple[Host, ...]], bool],
        announce: Callable[[tuple[Host, ...]], None],
    ) -> None:
        """The thread calls `announce(hosts)` whenever `differs(hosts)` is true."""
        self._source, self._differs, self._announce = source, differs, announce
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keras_ddl-hosts", daemon=True)

    def __enter__(self) -> HostWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        before: tuple[Host, ...] | None = None
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                hosts = self._source.hosts(self._stopped.is_set)
            except LaunchError:  # reported at the next restart
                continue
            if self._stopped.is_set():
                return
            if hosts == before and self._differs(hosts):
                self._announce(hosts)
            before = hosts
