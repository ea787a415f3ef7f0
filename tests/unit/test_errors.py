import pytest

from keras_ddl import errors


def test_errors_derive_from_the_family_and_a_builtin():
    builtins = {"ConfigError": ValueError, "DependencyError": ImportError, "DeadlineError": TimeoutError}
    kinds = {name: kind for name, kind in vars(errors).items() if name.endswith("Error") and name != "KerasDdlError"}
    assert len(kinds) >= 12
    for name, kind in kinds.items():
        assert issubclass(kind, errors.KerasDdlError) and issubclass(kind, builtins.get(name, RuntimeError)), name


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (3, errors.ConfigError),
        (4, errors.DeadlineError),
        (5, errors.NotInitializedError),
        (9, errors.RankMismatchError),
        (10, errors.RankLostError),
        (13, errors.CollectiveError),
        (14, errors.RankLostError),
        (15, errors.CheckFailedError),
        (77, errors.CollectiveError),
    ],
)
def test_from_code_returns_the_error_of_a_native_status(code, kind):
    error = errors.from_code(code, "the message")
    assert type(error) is kind and str(error) == "the message"
    assert getattr(error, "has_left", None) == {14: True, 10: False}.get(code)


def test_lost_rank_is_found_behind_other_errors():
    for inner in (errors.from_code(14, "x", lost=(1,)), errors.from_code(10, "y", lost=(1, 2))):
        try:
            try:
                raise inner
            except errors.RankLostError as error:
                raise RuntimeError("epoch 3") from error
        except RuntimeError as outer:
            assert errors.lost_rank_behind(outer) is inner
            outer.__cause__.__cause__ = outer  # a cycle must not hang it
            assert errors.lost_rank_behind(outer) is inner
        # The error of a library that keeps only the text.
        known = errors.lost_rank_behind(ValueError(f"C++: {inner} [line 3]"))
        assert known is not None and (str(known), known.ranks) == (str(inner), inner.ranks)
    assert errors.lost_rank_behind(ValueError("RankLostError: rank 0 is gone")) is None
    assert errors.lost_rank_behind(None) is None


@pytest.mark.parametrize("message", ["rank 7 has left", "rank 7 on host h (process 8) died.", "", "ошибка"])
def test_only_fields_say_what_an_error_is_about(message: str):
    error = errors.from_code(10, message, lost=(3, 4, 3), named=(5,), tensor="loss")
    assert (error.ranks, error.has_left, error.tensor, str(error)) == ((3, 4), False, "loss", message)
    assert errors.from_code(14, message, named=(5,)).ranks == () and errors.from_code(14, message).has_left


def test_ranks_of_a_communicator_are_numbered_as_in_the_job():
    errors.number_ranks(77, (2, 5))
    try:
        assert errors.from_code(10, "rank 1 died", lost=(1,), communicator=77).ranks == (5,)
        assert errors.from_code(10, "rank 1 died", lost=(1,), communicator=78).ranks == (1,)
    finally:
        errors.number_ranks(77, None)
    assert errors.from_code(10, "rank 1 died", lost=(1,), communicator=77).ranks == (1,)
