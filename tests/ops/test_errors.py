"""TensorFlow's errors, turned into keras_ddl's when they come from its ops."""

import pytest

from keras_ddl import errors
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
def test_from_tensorflow_takes_tensorflows_decoration_off(text):
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


def test_from_tensorflow_knows_what_tensorflow_has_replaced():
    text = (
        "keras_ddl: rank 1 has left\n\t [[{{node x}}]]\nExecuting non-communication op <x> originally returned "
        "UnavailableError, and was replaced by InternalError to avoid invoking TF network error handling logic."
    )
    translated = op_errors.from_tensorflow(tf.errors.InternalError(None, None, text))
    assert isinstance(translated, errors.RankLostError)
    assert translated.has_left
    assert str(translated) == "rank 1 has left"


def test_from_tensorflow_shows_the_text_of_an_assertion_as_it_was():
    text = """size of "größe 'x'" \\ [1]: differs"""
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.raw_ops.Assert(condition=False, data=[f"keras_ddl: {text}"])
    assert str(op_errors.from_tensorflow(caught.value)) == text


def test_translate_errors_leaves_other_errors_alone():
    for original in (tf.errors.AbortedError(None, None, "not ours"), ValueError("keras_ddl: neither")):
        with pytest.raises(type(original)) as caught, op_errors.translate_errors():
            raise original
        assert caught.value is original
