"""keras-ddl run --config FILE: reads options, program and variables from a TOML file."""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from keras_ddl import parts
from keras_ddl.cli.option_kinds import InFile, Rare
from keras_ddl.errors import ConfigError

_COMMAND, _ENV = "command", "env"
_NOT_IN_FILES = ("config", "help", _ENV)
# Only one of these names the hosts, so an option on the command line replaces such options in the file.
_HOSTS = ("hosts", "hostfile", "tf_config", "tf_config_file", "host_discovery_script")
# Name of an option's type -> types of TOML that it takes, in words, and as an example.
_TEXT = ((str,), "a string", "'text'")
_KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {
    "boolean": ((bool,), "true or false", "true"),
    "integer": ((int,), "a whole number", "2"),
    "integer range": ((int,), "a whole number", "2"),
    "float": ((int, float), "a number", "2.5"),
    "ranks": ((int, str), "a whole number, or a range such as '2:4'", "2"),
}
_NUMBER = re.compile(r"-np?=?(\d+(?::\d*)?)")
# Options of earlier versions.
_REPLACED = {
    **dict.fromkeys(("--min-np", "--min-num-proc", "--min-ranks", "--max-np", "--max-num-proc"), "-np MIN:MAX"),
    "--explain-step": "-x KERAS_DDL_EXPLAIN_STEP=1",
}
_META, _HELP_ALL = "keras_ddl.cli.job_file", "keras_ddl.cli.help_all"


def show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Callback of --help-all: shows the help with all options, and exits."""
    if value and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class Command(click.Command):
    """A command whose --config has the callback `load`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a line or two for each common option; with --help-all, all options and spellings."""
        shows_all = ctx.meta.get(_HELP_ALL, False)
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        for title, those in (
            ("Options", [each for each in options if not isinstance(each, InFile if shows_all else Rare)]),
            ("Only in the file of --config", [each for each in options if shows_all and isinstance(each, InFile)]),
        ):
            rows = [(_spelling(each, shows_all), each.help or "") for each in those]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Completes the command line with the file's program, variables and hosts.

        Raises: NoSuchOption: an unknown option, with one dash or two; the error names similar options.
        """
        words = self._spelled_out(args)
        try:
            rest = super().parse_args(ctx, [*words])
        except click.NoSuchOption as error:
            known = [word for each in self.params for word in each.opts]
            word = next((each for each in words if each.startswith(error.option_name)), error.option_name)
            if (now := _REPLACED.get(word.partition("=")[0])) is not None:
                raise click.UsageError(f"{word.partition('=')[0]} is now {now}.", ctx=ctx) from None
            if parts.is_missing(word.partition("=")[0]):
                raise click.UsageError(parts.why_missing(word.partition("=")[0]), ctx=ctx) from None
            if word.startswith("--") or error.possibilities:
                raise
            raise click.NoSuchOption(word, possibilities=difflib.get_close_matches(word, known), ctx=ctx) from None
        for option in self.params:
            if (
                isinstance(option, InFile)
                and ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
            ):
                key = option.opts[0][2:]
                raise click.UsageError(
                    f"{key} is a setting of --config FILE: write {key} = {option.metavar} there.", ctx
                )
        program, env = ctx.meta.get(_META, ((), ()))
        ctx.params["program"] = ctx.params["program"] or program
        ctx.params["env"] = (*env, *ctx.params["env"])  # the last one counts
        sources = {name: ctx.get_parameter_source(name) for name in _HOSTS}
        if ParameterSource.COMMANDLINE in sources.values():
            for name in [name for name, source in sources.items() if source is ParameterSource.DEFAULT_MAP]:
                ctx.params[name] = False if isinstance(ctx.params[name], bool) else None
        return rest

    def _spelled_out(self, args: list[str]) -> list[str]:
        """Returns the words with `-np2`, `-np=2` and `-n=2`, before the program, as `-np 2`: click reads `-n p2`."""
        flags = {word for each in self.params if isinstance(each, click.Option) and each.is_flag for word in each.opts}
        words: list[str] = []
        rest = [*args]
        while rest and rest[0].startswith("-") and rest[0] != "--":
            word = rest.pop(0)
            if match := _NUMBER.fullmatch(word):
                words += ["-np", match[1]]
                continue
            words.append(word)
            has_value = word not in flags and any(word in each.opts for each in self.params)
            if has_value and rest:
                words.append(rest.pop(0))
        return [*words, *rest]


def _spelling(option: click.Option, shows_all: bool) -> str:
    """Returns an option as the help shows it: by its first name, by all names, or as a line of a file."""
    metavar = "" if option.is_flag else f" {option.metavar}"
    if isinstance(option, InFile):
        return f"{option.opts[0][2:]} ={metavar}"
    return f"{', '.join(option.opts if shows_all else option.opts[:1])}{metavar}"


def load(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    """Callback of --config: makes the file's values the defaults of this command's options.

    Raises: ConfigError: the file is not TOML, or has an unknown key, a key twice, or a value of the wrong type.
    """
    if value is None:
        return
    try:
        settings = tomllib.loads(Path(value).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config must be a file in TOML. Received: {value}: {error}. Example: a line np = 4, and a line "
            'command = ["python", "train.py"].'
        ) from None
    ctx.meta[_META] = _program(settings.pop(_COMMAND, []), value), _env(settings.pop(_ENV, {}), value)
    by_name = _options(ctx.command)
    defaults: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, given in settings.items():
        if key not in by_name:
            (near,) = difflib.get_close_matches(key, [*by_name, _COMMAND, _ENV], n=1, cutoff=0)
            raise ConfigError(
                f"--config accepts the long names of the options of `keras-ddl run`, and {_COMMAND} and {_ENV}. "
                f"Received: {key!r} in {value}. The nearest is {near!r}."
            )
        option = by_name[key]
        assert option.name is not None
        if option.name in keys:
            raise ConfigError(
                f"--config: each option must be given once. Received: {keys[option.name]!r} and {key!r} in {value}, "
                "which are the same option. Leave one of them out."
            )
        keys[option.name], defaults[option.name] = key, _value(ctx, option, key, given, value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _options(command: click.Command) -> dict[str, click.Option]:
    """Returns the options of a command by their long names, without dashes."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    by_name = {word[2:]: option for option in options for word in option.opts if word.startswith("--")}
    return {name: option for name, option in by_name.items() if name not in _NOT_IN_FILES}


def _value(ctx: click.Context, option: click.Option, key: str, given: object, file: str) -> Any:
    """Returns the value of an option, which is checked as on the command line."""
    accepted, what, example = _KINDS.get(option.type.name, _TEXT)
    values = given if option.multiple and isinstance(given, list) else [given]
    for each in values:
        if not isinstance(each, accepted) or (isinstance(each, bool) and bool not in accepted):
            rule = f"{what}{', or a list of these' if option.multiple else ''}"
            raise ConfigError(
                f"--config: {key} must be {rule}. Received: {key} = {each!r} ({type(each).__name__}) in {file}. Write "
                f"{key} = {example}."
            )
        try:
            option.type.convert(each, option, ctx)
        except click.BadParameter as error:
            raise ConfigError(
                f"--config: {key} must be a value that `keras-ddl run --help-all` allows. Received: {key} = {each!r} "
                f"in {file}: {error.message}"
            ) from None
    return values if option.multiple else given


def _program(given: object, file: str) -> tuple[str, ...]:
    if isinstance(given, str):
        try:
            return tuple(shlex.split(given))
        except ValueError as error:
            raise ConfigError(
                f"--config: {_COMMAND} must be a command line in shell syntax. Received: {_COMMAND} = {given!r} in "
                f'{file}, {error}. Write a list, as {_COMMAND} = ["python", "train.py"].'
            ) from None
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return tuple(given)
    raise ConfigError(
        f"--config: {_COMMAND} must be a string, or a list of strings. Received: {_COMMAND} = {given!r} in {file}. "
        f'Write {_COMMAND} = ["python", "train.py"].'
    )


def _env(given: object, file: str) -> tuple[str, ...]:
    if not isinstance(given, dict):
        raise ConfigError(
            f"--config: {_ENV} must be a table. Received: {_ENV} = {given!r} in {file}. Write [{_ENV}], and below it a "
            'line NAME = "value" for each variable.'
        )
    for name, value in given.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"--config: a variable must be a string. Received: {name} = {value!r} in [{_ENV}] of {file}. Write "
                f'{name} = "{value}".'
            )
    return tuple(f"{name}={value}" for name, value in given.items())
