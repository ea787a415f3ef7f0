"""horovod.run: runs a function on several ranks through `keras_ddl.run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_ddl import launch
from keras_ddl.errors import ConfigError
from keras_ddl.launch.hosts.hostfile import read as read_hostfile


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    verbose: Any = None,
    use_mpi: bool | None = None,
    start_timeout: float | None = None,
    disable_cache: bool | None = None,
    executable: str | None = None,
    **others: Any,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on `num_proc` ranks and returns their results by rank; see `keras_ddl.run`.

    If this process has called `install`, imports of horovod also find keras_ddl on the ranks.

    Args:
        np: the old name of num_proc.
        hosts: hosts and their ranks, as in "h0:2,h1:2".
        hostfile: a file with lines `h0 slots=2`, instead of `hosts`.
        use_mpi, start_timeout, disable_cache: ignored.
    Raises: ConfigError: keras_ddl does not support an argument, such as use_gloo, min_num_proc or ssh_port. Other
        errors are those of `keras_ddl.run`.
    """
    unknown = [name for name, value in others.items() if value not in (None, False)]
    if executable not in (None, sys.executable):
        unknown.append("executable")
    if unknown:
        raise ConfigError(
            "run takes func, args, kwargs, num_proc, hosts or hostfile, and verbose. Received: "
            f"{', '.join(f'{name}=' for name in unknown)}. Leave out the other arguments; for alternatives see "
            "docs/launch.md."
        )
    if hosts is not None and hostfile is not None:
        raise ConfigError("run: only one of hosts and hostfile may be given. Received: both.")
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
    return launch.run(func, np or num_proc, args, kwargs, hosts=hosts, verbose=bool(verbose))
