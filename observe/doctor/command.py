"""keras-ddl doctor: finds problems that would stop or slow a training, and names the remedies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from keras_ddl.errors import ConfigError, DeadlineError, LaunchError, RankError

if TYPE_CHECKING:
    from keras_ddl.launch.checks.finding import Finding

_MARKS = {"ok": ("ok", "green"), "note": ("note", "blue"), "warning": ("WARNING", "yellow"), "error": ("ERROR", "red")}
_SECONDS = 180.0


@click.command("doctor", short_help="Find problems that would stop or slow a training here, and the remedies.")
@click.option(
    "-np", "--np", "num_ranks", type=click.IntRange(min=1), help="Ranks to try (2, or all of the hosts).", metavar="N"
)
@click.option("--hosts", "-H", help="Hosts and the ranks each takes, as in h0:2,h1:2.", metavar="HOSTS")
@click.option("--directory", default=".", show_default=True, help="The directory of checkpoints.", metavar="DIR")
@click.option(
    "--timeout", type=float, default=_SECONDS, show_default=True, help="Time limit for the ranks.", metavar="SECONDS"
)
@click.option("--no-ranks", is_flag=True, help="Check this host only, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print findings as one JSON list.")
@click.option("--verbose", "-v", is_flag=True, help="Also print checks that passed.")
def command(
    num_ranks: int | None,
    hosts: str | None,
    directory: str,
    timeout: float,
    no_ranks: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Find problems that would stop or slow a training, and the remedies.

    \b
    keras-ddl doctor
    keras-ddl doctor --hosts h0:4,h1:4 --directory /shared/ckpt
    keras-ddl run -np 2 keras-ddl doctor
    srun -n 8 keras-ddl doctor

    Checks this host, then starts ranks (2, or those of --hosts), which check every host, compare the hosts, run each
    collective once and train a small network. Under keras-ddl run, mpirun or srun it is one of the ranks.

    The exit status is 0 if nothing is wrong, 3 with warnings, 1 with errors (as a rank: 1 with errors, else 0).
    """
    from keras_ddl.doctor import host, ranks
    from keras_ddl.launch.checks.finding import EXIT_STATUS, Finding, Severity, worst
    from keras_ddl.topology.launcher import find_launcher

    around = find_launcher()
    if around is not None:
        if num_ranks is not None or hosts is not None:
            raise ConfigError(
                f"doctor: -np and --hosts start ranks, but this process is a rank already. Received: np={num_ranks}, "
                f"hosts={hosts!r} in a process that {around.name} started as rank {around.rank}. Leave them out."
            )
        findings, num_hosts = ranks.everything(directory)
        if around.rank == 0:
            _show(findings, as_json, verbose, f"{around.size} rank(s) on {num_hosts} host(s)")
        # Warnings must not fail the job, whose launcher would then print more than the doctor.
        return EXIT_STATUS[Severity.ERROR] if worst(findings) is Severity.ERROR else 0
    findings = host.check(directory)
    title = "this host; no ranks were started"
    if not no_ranks and worst(findings) is not Severity.ERROR:  # ranks would fail by the same error
        import keras_ddl

        started = num_ranks if num_ranks is not None or hosts is not None else 2
        # TensorFlow's messages at import are not findings.
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            results = keras_ddl.run(
                ranks.everything, np=started, args=(directory,), hosts=hosts, timeout=timeout or None, env=quiet
            )
            findings, num_hosts = results[0]
            title = f"{len(results)} rank(s) on {num_hosts} host(s)"
        except (LaunchError, DeadlineError, RankError) as error:
            # An unreachable host, different versions or a failing collective are findings.
            findings = [*findings, Finding(Severity.ERROR, "ranks", str(error))]
            title = "this host; ranks could not be started"
    _show(findings, as_json, verbose, title)
    return EXIT_STATUS[worst(findings)]


def _show(findings: list[Finding], as_json: bool, verbose: bool, title: str) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [each.as_json() for each in findings]
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo(title)
    fine = 0
    for each in sorted(findings, key=lambda finding: -finding.severity):
        word, colour = _MARKS[each.severity.name.lower()]
        if word == "ok" and not verbose:
            fine += 1
            continue
        where = f" on {each.host}" if each.host else ""
        click.echo(f"{click.style(f'{word:<7}', fg=colour, bold=word != 'ok')} {each.subject}{where}: {each.found}")
        if each.remedy:
            click.echo(f"        {each.remedy}")
    if fine:
        click.echo(f"{click.style('ok', fg='green')}      {fine} checks (--verbose shows them)")
