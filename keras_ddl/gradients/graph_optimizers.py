"""Makes optimizers of tf.compat.v1.train reduce their gradients, for `import ddl` and for Horovod."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from keras_ddl.compat import replacing

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

    def compute(original: Any, *args: Any, **kwargs: Any) -> Pairs:
        return computed(list(original(*args, **kwargs)))

    def apply(original: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        return original(applied(list(grads_and_vars)), *args, **kwargs)

    def apply_of_any(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(functools.partial(original, optimizer), *args, **kwargs)

    applies = apply_of_any if isinstance(owner, type) else apply
    replacing.replace([(owner, "compute_gradients", compute), (owner, "apply_gradients", applies)])
