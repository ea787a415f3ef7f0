"""Hosts that come and go while a job runs: the launcher asks its script, and tells the ranks, which may then leave."""

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
from keras_ddl.launch.placement import Discovery

# EX_TEMPFAIL of sysexits.h: start it again.
RESTART_STATUS = 75
_ASK_SECONDS = 2.0


def told() -> bool:
    """Whether this rank's launcher would now start the job on other hosts, or with another number of ranks."""
    run_dir = config.get("RUN_DIR")
    return run_dir is not None and (Path(run_dir) / HOSTS_FILE).exists()


def leave() -> NoReturn:
    """Ends this rank so that the job is started again. To be called by all ranks, after `told` on one."""
    sys.exit(RESTART_STATUS)


class HostWatch:
    """Asks the script in a thread while it is entered; what it answers twice in a row counts."""

    def __init__(
        self, discovery: Discovery, differs: Callable[[tuple[Host, ...]], bool], tell: Callable[[], None]
    ) -> None:
        """`tell` is called once, by the thread, when `differs(hosts)`."""
        self._discovery, self._differs, self._tell = discovery, differs, tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keras_ddl-hosts", daemon=True)

    def __enter__(self) -> HostWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before: tuple[Host, ...] | None = None
        while not self._over.wait(_ASK_SECONDS):
            try:
                hosts = self._discovery.hosts(self._over.is_set)
            except LaunchError:  # said when the answer is needed
                continue
            if self._over.is_set():
                return
            if hosts == before and self._differs(hosts):
                self._tell()
                return
            before = hosts
