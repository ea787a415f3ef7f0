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
    assert type(error) is kind and str(error) == "the message"
    assert getattr(error, "has_left", None) == {14: True, 10: False}.get(code)


def test_a_lost_rank_is_found_behind_other_errors():
    for inner in (errors.from_code(14, "rank 1 has left"), errors.from_code(10, "rank 1 on host h (process 7) died.")):
        try:
            try:
                raise inner
            except errors.RankLostError as error:
                raise RuntimeError("epoch 3") from error
        except RuntimeError as outer:
            assert errors.lost_rank_behind(outer) is inner
            outer.__cause__.__cause__ = outer  # a circle must not hold it up
            assert errors.lost_rank_behind(outer) is inner
        # The error of a library that keeps the text alone.
        known = errors.lost_rank_behind(ValueError(f"C++: {inner} [line 3]"))
        assert known is not None and (str(known), known.ranks) == (str(inner), inner.ranks)
    assert errors.lost_rank_behind(ValueError("RankLostError: rank 0 is gone")) is None
    assert errors.lost_rank_behind(None) is None


@pytest.mark.parametrize(
    ("message", "ranks"),
    [
        ("all_reduce 'x' (float32[2]) cannot complete: rank 3 has left (its process on host h ended)", (3,)),
        ("rank 12 on host h0 (process 4711) died. See the end of its output.", (12,)),
        ("no sign of life from rank(s) 4, 5 on host h2 for 8 s", (4, 5)),
        ("something else", ()),
    ],
)
def test_a_lost_rank_is_named(message: str, ranks: tuple[int, ...]):
    assert errors.from_code(14, message).ranks == ranks
