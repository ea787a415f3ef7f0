"""TensorFlow's errors become keras_ddl's errors if they come from keras_ddl's ops."""

import ctypes

import pytest

from keras_ddl import errors
from keras_ddl.communicator.native import native_library
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ops import errors as op_errors

MESSAGE = "all_reduce 'loss': ranks disagree. Received: [2] and [3]."


@pytest.mark.parametrize(
    "text",
    [
        f"{{{{function_node __wrapped__X}}}} keras_ddl: {MESSAGE} [Op:DdlAllReduce] name: ddl_all_reduce",
        f"Graph execution error:\n\nDetected at node x\nkeras_ddl: {MESSAGE}\n\t [[{{{{node x}}}}]] [Op:__inference_f]",
        f"2 root error(s) found.\n  (0) ABORTED:  keras_ddl: {MESSAGE}\n\t [[{{{{node x}}}}]]\n"
        "  (1) ABORTED:  keras_ddl: another\n0 successful operations.",
        f"keras_ddl: {MESSAGE}",
    ],
)
def test_from_tensorflow_removes_tensorflows_decoration(text):
    translated = op_errors.from_tensorflow(tf.errors.FailedPreconditionError(None, None, text))
    assert isinstance(translated, errors.RankMismatchError)
    assert str(translated) == MESSAGE


@pytest.mark.parametrize(
    ("tensorflow_error", "kind"),
    [
        (tf.errors.InvalidArgumentError, errors.ConfigError),
        (tf.errors.DeadlineExceededError, errors.DeadlineError),
        (tf.errors.FailedPreconditionError, errors.RankMismatchError),
        (tf.errors.AbortedError, errors.RankLostError),
        (tf.errors.UnavailableError, errors.RankLostError),
        (tf.errors.DataLossError, errors.CheckFailedError),
        (tf.errors.InternalError, errors.CollectiveError),
    ],
)
def test_translate_errors_keeps_the_kind_and_the_cause(tensorflow_error, kind):
    original = tensorflow_error(None, None, "keras_ddl: why")
    with pytest.raises(kind, match="^why$") as caught, op_errors.translate_errors():
        raise original
    assert caught.value.__cause__ is original


def stored_failure(code: int, message: str, **roles: int) -> str:
    """Stores a failure of the collective 'loss' and returns the text that the ops give TensorFlow."""
    ranks = (native_library.FailedRank * len(roles))(
        *((int(rank.removeprefix("rank")), role) for rank, role in roles.items())
    )
    failure = native_library.Failure(code, len(roles), ranks, message.encode(), b"loss", 0)
    return f"keras_ddl[{native_library.core().ddl_keep_failure(ctypes.byref(failure)):012x}]: "


@pytest.mark.parametrize("rest", ["rank 1 has left", "garbled: rank 4 died", "", " [[{{node x}}]] [Op:X]"])
def test_from_tensorflow_uses_stored_fields_rather_than_the_text(rest):
    # TensorFlow adds these words to codes that it takes for network failures.
    text = f"{{{{node x}}}} {stored_failure(14, 'why', rank1=1, rank2=3)}{rest}\nExecuting non-communication op <x>"
    translated = op_errors.from_tensorflow(tf.errors.InternalError(None, None, text))
    assert isinstance(translated, errors.RankLostError)
    assert (translated.has_left, translated.ranks, translated.tensor, str(translated)) == (True, (1,), "loss", "why")


def test_from_tensorflow_uses_the_code_for_failures_of_other_processes():
    text = f"keras_ddl[{1 << 47:012x}]: rank 1 died [[node]]"
    translated = op_errors.from_tensorflow(tf.errors.AbortedError(None, None, text))
    assert isinstance(translated, errors.RankLostError) and not translated.ranks
    assert str(translated) == "rank 1 died"


def test_from_tensorflow_keeps_the_text_of_an_assertion():
    text = """size of "größe 'x'" \\ [1]: differs"""
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.raw_ops.Assert(condition=False, data=[f"keras_ddl: {text}"])
    assert str(op_errors.from_tensorflow(caught.value)) == text


def test_translate_errors_leaves_other_errors_alone():
    for original in (tf.errors.AbortedError(None, None, "not ours"), ValueError("keras_ddl: neither")):
        with pytest.raises(type(original)) as caught, op_errors.translate_errors():
            raise original
        assert caught.value is original
