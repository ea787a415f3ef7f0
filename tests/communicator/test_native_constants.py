"""Python's copies of native/ (numbers, structs, tables) equal the originals in the sources."""

import re
from pathlib import Path

import pytest

from keras_ddl import errors
from keras_ddl.communicator.native import binding, native_library, requests
from keras_ddl.communicator.native.dtypes import DTYPES

NATIVE = Path(__file__).resolve().parents[2] / "native"
CONTRACT = "core/include/ddl.h"


def matches(path, pattern):
    return re.findall(pattern, re.sub(r"//.*", "", (NATIVE / path).read_text(encoding="utf-8")), re.DOTALL)


def numbers(name):
    """Returns name in lower case -> number, for an enum of ddl.h."""
    (body,) = matches(CONTRACT, rf"typedef enum {name} \{{(.*?)\}} {name};")
    constants = re.findall(r"DDL_(\w+) = (\d+)", body)
    return {constant.lower(): int(number) for constant, number in constants if not constant.startswith("NUM_")}


def test_dtypes_are_numbered_as_in_the_contract():
    assert numbers("ddl_dtype") == DTYPES


def test_dtypes_are_named_as_in_the_native_table():
    rows = matches("common/dtypes.h", r'X\(DDL_(\w+), "(\w+)", [\w:]+\)')
    assert [name for _, name in rows] == list(DTYPES)
    assert all(constant == name.upper() for constant, name in rows)


def test_tensorflow_ops_list_all_dtypes():
    pairs = matches("tf/attributes.cc", r"\{TF_\w+, DDL_(\w+)\}")
    assert sorted(name.lower() for name in pairs) == sorted(DTYPES)
    (listed,) = matches("tf/registration.cc", r'"T: \{([^}]*)\}"')
    spelled = {"half": "float16", "float": "float32", "double": "float64"}
    assert sorted(spelled.get(name, name) for name in listed.split(", ")) == sorted(DTYPES)


def test_requests_are_numbered_as_in_the_contract():
    assert {name: getattr(requests, name.upper()) for name in numbers("ddl_kind")} == numbers("ddl_kind")
    ops = numbers("ddl_op")
    assert ops.pop("adasum") not in requests.OPS.values()  # exists only in TensorFlow's ops
    assert ops | {"avg": ops["mean"]} == requests.OPS
    compressions = {name.removeprefix("compression_"): number for name, number in numbers("ddl_compression").items()}
    assert {str(name).lower(): number for name, number in requests.COMPRESSIONS.items()} == compressions
    assert numbers("ddl_device_kind") == {"host": 0, "cuda": requests._CUDA}
    assert list(numbers("ddl_device_mode").values()) == list(binding._DEVICE_MODES.values())
    flags = matches(CONTRACT, r"#define DDL_(FLAG_\w+) (\d+)u")
    assert len(flags) == 6
    assert {name: getattr(requests, name) for name, _ in flags} == {name: int(bits) for name, bits in flags}


def test_codes_and_version_equal_the_contracts():
    codes = numbers("ddl_code")
    assert codes["deadline_exceeded"] == native_library.DEADLINE_EXCEEDED
    assert codes["failed_precondition"] == native_library.FAILED_PRECONDITION
    assert codes["not_found"] == native_library.NOT_FOUND
    assert numbers("ddl_rank_role")["rank_named"] == native_library._RANK_NAMED
    kinds = {name: type(errors.from_code(code, "")) for name, code in codes.items() if name not in ("ok", "internal")}
    assert errors.CollectiveError not in kinds.values()
    assert kinds["unavailable"] is kinds["aborted"] is errors.RankLostError
    assert kinds["invalid_argument"] is errors.ConfigError
    (version,) = matches(CONTRACT, r"#define DDL_ABI_VERSION (\d+)")
    assert int(version) == native_library.ABI_VERSION


@pytest.mark.parametrize(
    "name",
    ["Location", "Buffer", "Request", "Place", "Counters", "Traced", "Transport", "Options", "Failure"],
)
def test_structs_have_the_fields_of_the_contract(name):
    struct = f"ddl_{name.lower()}"
    (body,) = matches(CONTRACT, rf"typedef struct {struct} \{{(.*?)\}} {struct};")
    declared = [re.search(r"\(\*(\w+)\)|(\w+)(?:\[\d+\])?$", each.strip()) for each in body.split(";")[:-1]]
    fields = [field for field, _ in getattr(native_library, name)._fields_ if field != "functions"]
    if name == "Transport":
        fields += [field for field, _ in native_library.TransportFunctions._fields_]
    renamed = {"input": "in", "output": "out"}  # `in` is a Python keyword
    assert [renamed.get(field, field) for field in fields] == [each[1] or each[2] for each in declared]
