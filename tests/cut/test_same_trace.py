"""`trace_digest` differs exactly if traces compute different results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_ddl.compat.tensorflow import optimized_once
from keras_ddl.cut import Program, trace_digest

ROWS = tf.TensorSpec([6, 3])
FIRST, SECOND = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([4.0, 5.0, 6.0])
Step = Callable[[tf.Tensor], Any]


def digest(step: Step, spec: tf.TensorSpec = ROWS) -> bytes:
    return trace_digest(Program(tf.function(step, autograph=False).get_concrete_function(spec).graph))


def branch(inner: Step) -> Step:
    return lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: x)


def loop(inner: Step) -> Step:
    return lambda x: tf.while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, inner(x)), (0, x))[1]


def call(inner: Step) -> Step:
    return lambda x: tf.function(inner, autograph=False)(x)


def compiled(inner: Step) -> Step:
    return lambda x: tf.function(inner, autograph=False, jit_compile=True)(x)


STEPS: dict[str, Step] = {
    "sum": lambda x: tf.reduce_sum(x, 1, keepdims=True),
    "a shape": lambda x: tf.reduce_sum(x, 1),
    "sums so far": lambda x: tf.cumsum(x),
    "an attribute": lambda x: tf.cumsum(x, exclusive=True),
    "a constant": lambda x: tf.reduce_sum(x, 0, keepdims=True),
    "an operation": lambda x: tf.reduce_max(x, 1, keepdims=True),
    "a variable twice": lambda x: tf.reduce_sum(x * FIRST * FIRST, 1, keepdims=True),
    "two variables": lambda x: tf.reduce_sum(x * FIRST * SECOND, 1, keepdims=True),
    "a string": lambda x: tf.strings.join([tf.constant("one"), tf.strings.as_string(x)]),
    "another string": lambda x: tf.strings.join([tf.constant("two"), tf.strings.as_string(x)]),
    "a pattern": lambda x: tf.strings.regex_replace(tf.strings.as_string(x), "1", ""),
    "another pattern": lambda x: tf.strings.regex_replace(tf.strings.as_string(x), "2", ""),
    "a write": lambda x: (FIRST.assign_add(x[0]), tf.reduce_sum(x, 1, keepdims=True))[1],
    "outputs": lambda x: [x, tf.reduce_sum(x, 1, keepdims=True)],
    "the order of outputs": lambda x: [tf.reduce_sum(x, 1, keepdims=True), x],
    "a device": lambda x: on_cpu(tf.reduce_sum, x, 1, keepdims=True),
}
for within in (branch, loop, call, compiled):
    for exponent in (2.0, 3.0):
        STEPS[f"{within.__name__}, {exponent}"] = within(lambda x, exponent=exponent: x**exponent)
    STEPS[f"{within.__name__}, a constant"] = within(lambda x: x * tf.constant([[1.0, 2.0, 3.0]]))
    STEPS[f"{within.__name__}, another constant"] = within(lambda x: x * tf.constant([[1.0, 2.0, 4.0]]))


def on_cpu(function: Callable[..., tf.Tensor], *args: Any, **kwargs: Any) -> tf.Tensor:
    with tf.device("CPU:0"):
        return function(*args, **kwargs)


def test_traces_differ() -> None:
    seen: dict[bytes, str] = {digest(STEPS["sum"], tf.TensorSpec([None, 3])): "other rows"}
    for name, step in STEPS.items():
        assert (other := seen.setdefault(digest(step), name)) == name, f"{name} has the digest of {other}"


def test_digest_ignores_names() -> None:
    for name, step in STEPS.items():
        before = digest(step)
        with tf.name_scope("elsewhere"):  # changes names, as does the order of tracing
            assert digest(step) == before, name


def test_digest_ignores_how_a_process_runs_functions() -> None:
    """Ranks have different GPUs, and on different hosts other numbers of threads."""
    for name in ("call, 2.0", "compiled, 2.0"):
        before = digest(STEPS[name])
        with optimized_once():  # changes TensorFlow's ConfigProto, which calls of functions carry
            assert digest(STEPS[name]) == before, name


def test_digest_ignores_strings_in_file_names_and_messages() -> None:
    def step(own: str) -> Step:
        def write(x: tf.Tensor) -> tf.Tensor:
            name = tf.strings.join([tf.constant(own), "_", tf.strings.as_string(tf.reduce_sum(x))])
            tf.io.write_file(name, tf.constant(own))
            tf.print(own, x)
            tf.debugging.assert_greater(tf.reduce_sum(x), 0.0, message=own)
            return tf.debugging.check_numerics(x, own)

        return write

    assert digest(step("one")) == digest(step("other"))
    assert digest(call(step("one"))) == digest(call(step("other")))
    assert digest(step("one")) != digest(lambda x: x)
