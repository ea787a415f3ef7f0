"""The options of `keras-ddl run` that watch a job: --events, --metrics-port, --metrics-address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from keras_ddl.cli.option_kinds import Rare
from keras_ddl.cli.part_options import RunOptions
from keras_ddl.errors import ConfigError
from keras_ddl.launch.watchers import Watcher


class MonitoringOptions(RunOptions):
    """The event log and the metrics of a job."""

    options = (
        Rare(
            ["--events"],
            type=click.Path(dir_okay=False),
            help="Append a line of JSON for each start, end, loss, restart and checkpoint.",
            metavar="FILE",
        ),
        Rare(
            ["--metrics-port"],
            type=click.IntRange(0, 65535),
            help="Serve metrics for Prometheus on this port while the job runs; 0: any free port.",
            metavar="PORT",
        ),
        Rare(
            ["--metrics-address"],
            help="Address of --metrics-port (127.0.0.1); 0.0.0.0 lets other hosts read the metrics.",
            metavar="ADDRESS",
        ),
    )

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises: ConfigError: an address without a port."""
        address = values["metrics_address"]
        if address is not None and values["metrics_port"] is None:
            raise ConfigError(
                f"--metrics-address needs --metrics-port. Received: --metrics-address {address} alone. Add "
                "--metrics-port 9464, or 0 for any free port."
            )

    def wants_figures(self, values: Mapping[str, Any]) -> bool:
        return values["metrics_port"] is not None

    @contextlib.contextmanager
    def watching(self, values: Mapping[str, Any], *, verbose: bool) -> Iterator[Sequence[Watcher]]:
        """Yields the event log and the metrics if the options ask for them.

        Raises: ConfigError, LaunchError: as EventLog and MetricsServer.
        """
        from keras_ddl.monitoring.events import EventLog

        events, port = values["events"], values["metrics_port"]
        with contextlib.ExitStack() as stack:
            watchers: list[Watcher] = []
            if events is not None:
                watchers.append(EventLog(events, _say))
            if port is not None:
                from keras_ddl.monitoring.metrics_server import MetricsServer  # imports Python's HTTP server

                server = MetricsServer(values["metrics_address"] or "127.0.0.1", port)
                stack.callback(server.close)
                watchers.append(server.watcher)
                if verbose or port == 0:
                    _say(f"metrics: {server.url}")
            yield watchers


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads the output
        click.echo(f"keras-ddl: {text}", err=True)
