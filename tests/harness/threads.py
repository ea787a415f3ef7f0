"""Runs a function in several threads, one per simulated rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def results_or_errors(function: Callable[[Key], Result], keys: Iterable[Key]) -> dict[Key, Result | Exception]:
    """Runs all keys at once; returns for each key what the function returned or raised."""
    results: dict[Key, Result | Exception] = {}

    def run(key: Key) -> None:
        try:
            results[key] = function(key)
        except Exception as error:  # the test examines it
            results[key] = error

    threads = [threading.Thread(target=run, args=(key,)) for key in keys]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def results_of(function: Callable[[Key], Result], keys: Iterable[Key]) -> dict[Key, Result]:
    """Like `results_or_errors`. Raises: the first error."""
    results: dict[Key, Result] = {}
    for key, each in results_or_errors(function, keys).items():
        if isinstance(each, Exception):
            raise each
        results[key] = each
    return results
