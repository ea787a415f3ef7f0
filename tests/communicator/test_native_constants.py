"""One table of element types in Python, one in native/: the same types, in the order of ddl.h."""

import re
from pathlib import Path

from keras_ddl.communicator.dtypes import DTYPES

NATIVE = Path(__file__).resolve().parents[2] / "native"


def found(path, pattern):
    return re.findall(pattern, (NATIVE / path).read_text(encoding="utf-8"))


def test_dtypes_are_numbered_as_in_the_contract():
    contract = {name.lower(): int(number) for name, number in found("core/include/ddl.h", r"DDL_([A-Z]+\d+) = (\d+),")}
    assert contract == DTYPES


def test_dtypes_are_named_as_in_the_native_table():
    rows = found("common/dtypes.h", r'X\(DDL_(\w+), "(\w+)", [\w:]+\)')
    assert [name for _, name in rows] == list(DTYPES)
    assert all(constant == name.upper() for constant, name in rows)


def test_dtypes_of_the_tensorflow_ops_are_all_of_them():
    pairs = found("tf/attributes.cc", r"\{TF_\w+, DDL_(\w+)\}")
    assert sorted(name.lower() for name in pairs) == sorted(DTYPES)
    (listed,) = found("tf/registration.cc", r'"T: \{(.*)\}"')
    spelled = {"half": "float16", "float": "float32", "double": "float64"}
    assert sorted(spelled.get(name, name) for name in listed.split(", ")) == sorted(DTYPES)
