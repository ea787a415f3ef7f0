"""Runs a function in several threads, one for each simulated rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def results_or_errors(function: Callable[[Key], Result], keys: Iterable[Key]) -> dict[Key, Result | Exception]:
    """Returns for each key what the function has returned or raised; all run at once, and end before this does."""
    results: dict[Key, Result | Exception] = {}

    def run(key: Key) -> None:
        try:
            results[key] = function(key)
        except Exception as error:  # the test looks at it
            results[key] = error

    threads = [threading.Thread(target=run, args=(key,)) for key in keys]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def results_of(function: Callable[[Key], Result], keys: Iterable[Key]) -> dict[Key, Result]:
    """As `results_or_errors`. Raises: what the first of them has raised."""
    results: dict[Key, Result] = {}
    for key, each in results_or_errors(function, keys).items():
        if isinstance(each, Exception):
            raise each
        results[key] = each
    return results
