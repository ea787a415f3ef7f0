import pytest

from keras_ddl import errors


def test_errors_derive_from_the_family_and_a_builtin():
    pairs = {
        errors.ConfigError: ValueError,
        errors.NotInitializedError: RuntimeError,
        errors.DependencyError: ImportError,
        errors.RankMismatchError: RuntimeError,
        errors.RankLostError: RuntimeError,
        errors.DeadlineError: TimeoutError,
        errors.CheckFailedError: RuntimeError,
        errors.CollectiveError: RuntimeError,
        errors.CheckpointError: RuntimeError,
        errors.ExportError: RuntimeError,
        errors.LaunchError: RuntimeError,
        errors.RankError: RuntimeError,
    }
    for kind, builtin in pairs.items():
        assert issubclass(kind, errors.KerasDdlError)
        assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (3, errors.ConfigError),
        (4, errors.DeadlineError),
        (9, errors.RankMismatchError),
        (10, errors.RankLostError),
        (13, errors.CollectiveError),
        (14, errors.RankLostError),
        (15, errors.CheckFailedError),
        (77, errors.CollectiveError),
    ],
)
def test_from_code_gives_the_error_of_a_native_status(code, kind):
    error = errors.from_code(code, "the message")
    assert type(error) is kind
    assert str(error) == "the message"


def test_from_code_tells_a_rank_that_left_from_one_that_died():
    assert errors.from_code(14, "rank 1 ...").has_left
    assert not errors.from_code(10, "rank 1 ...").has_left


def test_a_rank_that_left_is_found_behind_other_errors():
    from keras_ddl.communicator.error_report import _has_left

    left, died = errors.from_code(14, "rank 1 has left"), errors.from_code(10, "rank 1 died")
    for inner, expected in ((left, True), (died, False)):
        try:
            try:
                raise inner
            except errors.RankLostError as error:
                raise RuntimeError("epoch 3") from error
        except RuntimeError as outer:
            assert _has_left(outer) == expected
            outer.__cause__.__cause__ = outer  # a circle must not hold it up
            assert _has_left(outer) == expected
