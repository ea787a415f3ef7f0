"""The options that parts add to `keras-ddl run` (parts.py: run_options)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from keras_ddl import parts
from keras_ddl.launch.watchers import Watcher, Watchers


class RunOptions:
    """The options of one part, which derives from this class.

    Attributes:
        options: the options, in the order of `keras-ddl run --help`.
    """

    options: Sequence[click.Option] = ()

    def check(self, values: Mapping[str, Any]) -> None:
        """Raises: ConfigError: the options contradict each other. `values`: the options of all parts, by name."""

    def environment(self, values: Mapping[str, Any], env: dict[str, str]) -> dict[str, str]:
        """Returns the variables of the program, given the variables that the command line sets."""
        return env

    def wants_figures(self, values: Mapping[str, Any]) -> bool:
        """Returns whether a watcher of this part wants the figures of the training."""
        return False

    @contextlib.contextmanager
    def watching(self, values: Mapping[str, Any], *, verbose: bool) -> Iterator[Sequence[Watcher]]:
        """Yields the watchers of the job while it runs."""
        yield ()


@functools.cache
def all_of_them() -> tuple[RunOptions, ...]:
    return tuple(make() for make in parts.provided("run_options"))


def add(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of all parts to a command, which gets their values as keyword arguments."""
    for option in reversed([each for part in all_of_them() for each in part.options]):
        command.__dict__.setdefault("__click_params__", []).append(option)
    return command


def check(values: Mapping[str, Any]) -> None:
    """Raises: ConfigError: options of a part contradict each other."""
    for part in all_of_them():
        part.check(values)


def environment(values: Mapping[str, Any], env: dict[str, str]) -> dict[str, str]:
    """Returns the variables of the program, given the variables that the command line sets."""
    for part in all_of_them():
        env = part.environment(values, env)
    return env


@contextlib.contextmanager
def watching(values: Mapping[str, Any], *, verbose: bool) -> Iterator[Watchers]:
    """Yields all watchers of the job while it runs.

    Raises: ConfigError, LaunchError: a watcher cannot start with these options.
    """
    with contextlib.ExitStack() as stack:
        watchers: list[Watcher] = []
        for part in all_of_them():
            watchers += stack.enter_context(part.watching(values, verbose=verbose))
        yield Watchers(watchers, figures=any(part.wants_figures(values) for part in all_of_them()))
