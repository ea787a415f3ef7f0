"""Notices changes of the available hosts: the launcher polls the script or file that names them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from keras_ddl.errors import LaunchError
from keras_ddl.launch.hosts import Host
from keras_ddl.launch.hosts.placement import Discovery, HostFile
from keras_ddl.launch.outcome import RESTART_STATUS
from keras_ddl.link import program

_POLL_SECONDS = 2.0


def hosts_changed() -> bool:
    """Whether the launcher would now start the job on other hosts, or with another number of ranks."""
    link = program.current()
    if link is None:
        return False
    link.look()
    return link.hosts_changed


def exit_for_restart() -> NoReturn:
    """Ends this rank so that the job is restarted. All ranks must call it once `hosts_changed()` is true on one."""
    sys.exit(RESTART_STATUS)


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
