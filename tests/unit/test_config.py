import pytest

from keras_ddl import config
from keras_ddl.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for row in config.VARIABLES.values():
        monkeypatch.delenv(row.environment_name, raising=False)


def test_get_returns_the_default_when_unset_or_empty(monkeypatch):
    assert config.get("DEADLINE_SECONDS") == 600.0
    monkeypatch.setenv("KERAS_DDL_DEADLINE_SECONDS", "")
    assert config.get("DEADLINE_SECONDS") == 600.0


def test_get_returns_the_typed_value(monkeypatch):
    monkeypatch.setenv("KERAS_DDL_DEADLINE_SECONDS", "2.5")
    monkeypatch.setenv("KERAS_DDL_BUCKET_BYTES", "4096")
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", "~/run")
    assert config.get("DEADLINE_SECONDS") == 2.5
    assert config.get("BUCKET_BYTES") == 4096
    monkeypatch.setenv("KERAS_DDL_BUCKET_BYTES", "auto")
    assert config.get("BUCKET_BYTES") == "auto"
    assert not config.get("RUN_DIR").startswith("~")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DRIFT_CHECK_PERCENT", "0", 0.0),
        ("DRIFT_CHECK_PERCENT", "100", 100.0),
        ("LOST_AFTER_SECONDS", "0", 0.0),
        ("LOST_AFTER_SECONDS", "1", 1.0),
        ("BUCKET_BYTES", "1", 1),
        ("HOST_RANK", "1/2@/run", (1, 2, "/run", 1)),
        ("HOST_RANK", "3/4/2@/run", (3, 4, "/run", 2)),
        ("HOST_RANK", "4/4@/run", (4, 4, "/run", 1)),  # a spare
    ],
)
def test_get_accepts_the_ends_of_a_range(monkeypatch, name, text, value):
    monkeypatch.setenv("KERAS_DDL_" + name, text)
    assert config.get(name) == value
    config.check_environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEADLINE_SECONDS", "soon"),
        ("DEADLINE_SECONDS", "nan"),
        ("WARN_AFTER_SECONDS", "inf"),
        ("LOST_AFTER_SECONDS", "0.5"),
        ("BUCKET_BYTES", "25MB"),
        ("BUCKET_BYTES", "0"),
        ("ISA", "sse9"),
        ("DRIFT_CHECK_PERCENT", "-1"),
        ("DRIFT_CHECK_PERCENT", "100.5"),
        ("HOST_RANK", "1/2@run"),
    ],
)
def test_get_refuses_a_value_of_the_wrong_type(monkeypatch, name, value):
    monkeypatch.setenv("KERAS_DDL_" + name, value)
    with pytest.raises(ConfigError, match=f"KERAS_DDL_{name}=.*Unset it"):
        config.get(name)
    with pytest.raises(ConfigError):
        config.check_environment()


def test_check_environment_names_the_nearest_known_variable(monkeypatch):
    monkeypatch.setenv("KERAS_DDL_DEADLINE_SECOND", "3")
    with pytest.raises(ConfigError, match="DEADLINE_SECOND='3'.*nearest is KERAS_DDL_DEADLINE_SECONDS"):
        config.check_environment()


def test_every_row_has_a_reason_and_a_unit_in_its_name():
    for row in config.VARIABLES.values():
        assert row.why.endswith(".")
        if row.type in ("seconds", "bytes"):
            assert row.name.endswith(row.type.upper())
