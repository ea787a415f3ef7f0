"""Makes optimizers of tf.compat.v1.train reduce their gradients, for `import ddl` and for Horovod."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

Pairs = list[tuple[Any, Any]]


def reduce_within(owner: Any, computed: Callable[[Pairs], Pairs], applied: Callable[[Pairs], Pairs]) -> None:
    """Makes compute_gradients and apply_gradients of `owner` reduce their gradients.

    Both methods reduce, because a script may call either one alone or change the gradients in between. So `applied`
    must not reduce gradients that were already reduced (`gradients.reduced`).

    Args:
        owner: the class tf.compat.v1.train.Optimizer, for every optimizer, or a single optimizer.
        computed: takes the (gradient, variable) pairs that compute_gradients would return; returns them reduced, in the
            same order.
        applied: does the same with the pairs that apply_gradients is called with.
    """
    kind: Any = owner if isinstance(owner, type) else type(owner)
    compute, apply = kind.compute_gradients, kind.apply_gradients

    @functools.wraps(compute)
    def compute_gradients(self: Any, *args: Any, **kwargs: Any) -> Pairs:
        return computed(list(compute(self, *args, **kwargs)))

    @functools.wraps(apply)
    def apply_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        return apply(self, applied(list(grads_and_vars)), *args, **kwargs)

    replace_methods(owner, compute_gradients, apply_gradients)


def replace_methods(owner: Any, *functions: Callable[..., Any]) -> None:
    """Sets functions as methods, under their own names, on a class or on one object."""
    for function in functions:
        method = function if isinstance(owner, type) else types.MethodType(function, owner)
        setattr(owner, function.__name__, method)
