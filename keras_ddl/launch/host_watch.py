"""Notices that the available hosts change: the launcher polls the discovery script and notifies the ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from keras_ddl import config
from keras_ddl.errors import LaunchError
from keras_ddl.launch.control import HOSTS_FILE
from keras_ddl.launch.mpirun import Host
from keras_ddl.launch.outcome import RESTART_STATUS
from keras_ddl.launch.placement import Discovery

_POLL_SECONDS = 2.0


def hosts_changed() -> bool:
    """Whether this rank's launcher would now start the job on other hosts, or with another number of ranks."""
    run_dir = config.get("RUN_DIR")
    return run_dir is not None and (Path(run_dir) / HOSTS_FILE).exists()


def exit_for_restart() -> NoReturn:
    """Ends this rank so that the job is restarted. All ranks must call it, after `hosts_changed` on one of them."""
    sys.exit(RESTART_STATUS)


class HostWatch:
    """Polls the script in a thread, as a context manager. A change counts when two answers in a row agree."""

    def __init__(
        self, discovery: Discovery, differs: Callable[[tuple[Host, ...]], bool], announce: Callable[[], None]
    ) -> None:
        """`announce` is called once, by the thread, when `differs(hosts)`."""
        self._discovery, self._differs, self._announce = discovery, differs, announce
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
                hosts = self._discovery.hosts(self._stopped.is_set)
            except LaunchError:  # reported at the next restart
                continue
            if self._stopped.is_set():
                return
            if hosts == before and self._differs(hosts):
                self._announce()
                return
            before = hosts
