"""Operations with rules that test_specs.py does not try in every placement: cut programs equal one process."""

from __future__ import annotations

import numpy as np
import pytest
from cut import rule_cases
from cut.comparing import difference
from cut.operations import by_index, lists, others, texts  # noqa: F401  (they register)
from cut.operations.cases import CASES, types_to_try
from cut.test_specs import TOPICS
from cut.together import Together

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.operations import segments

TRIED = {case.type for cases in (*TOPICS.values(), *rule_cases.TOPICS.values()) for case in cases}
PROGRAMS = list(dict.fromkeys(program for programs in CASES.values() for program in programs))
# Operations without rules in the programs, by the type that a program tests.
REPLICATED = {
    "GatherV2": {"ArgMax", "GatherV2", "TopKV2"},
    "ResourceGather": {"ArgMax"},
    "LookupTableFindV2": {"LookupTableFindV2"},
    "TensorListPopBack": {"TensorListFromTensor"},
    "EmptyTensorList": {"StridedSlice"},
    "Cholesky": {"BatchMatMulV2", "MatrixBandPart", "MatrixSetDiagV3"},
    "StringJoin": {"ReduceJoin", "ReverseV2", "TopKV2"},
}
LONG = ("algebra", "transforms")
_ROWS = np.random.default_rng(0)


def _rows(count: int) -> np.ndarray:
    return _ROWS.normal(size=(count, 3))


def types_of(program: object) -> list[str]:
    return [kind for kind, programs in CASES.items() if program in programs]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=types_of(each)[0], marks=[pytest.mark.long] if each.__name__ in LONG else [])
        for each in PROGRAMS
    ],
)
@pytest.mark.parametrize(
    ("static", "size", "batches"), [pytest.param(True, 2, [1], marks=pytest.mark.long), (False, 3, [5, 1])], ids=str
)
def test_operations_equal_one_process(program: object, static: bool, size: int, batches: list[int]) -> None:
    together = Together(lambda x: tf.nest.flatten(program(x)), [_rows(batches[0])], sizes=[size], static=static)
    replicated = set(together.reports[size][0].replicated)
    assert replicated <= REPLICATED.get(types_of(program)[0], set()), replicated
    assert set(types_of(program)) <= together.types, "not in the program"
    for rows in map(_rows, batches):
        expected = together.expected([rows])
        for rank, found in enumerate(together.outputs(size, [rows])):
            where = f"static={static} rows={len(rows)} rank {rank} of {size}"
            assert difference(found, expected) is None, f"{where}: {difference(found, expected)}"
    together.close()


@pytest.mark.parametrize("shape", [[-1, 3], [3, 1, -1]], ids=str)  # the second leaves nothing for -1 to divide
def test_reshape_of_one_row_with_unknown_extents(shape: list[int]) -> None:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reshape(x[:, None] * x[:, :, None], shape)]

    rows = _rows(1)
    together = Together(step, [rows], sizes=[3], static=True, open_extents=True)
    for found in together.outputs(3, [rows]):
        np.testing.assert_array_equal(found[0], together.expected([rows])[0])


def test_every_type_of_operation_with_a_rule_is_tried() -> None:
    tested_as_parts = {"ReadVariableOp", *(f"Assign{each}VariableOp" for each in ("", "Add", "Sub"))}  # test_parts.py
    tested_as_tables = {"ResourceScatterAdd", "ResourceScatterSub"}  # test_tables.py
    tested_as_segments = {*segments.COMBINING}  # test_segments.py
    drawn = {
        f"StatelessRandom{each}V2" for each in ("Uniform", "Normal", "UniformInt", "UniformFullInt")
    }  # test_random.py
    assert (
        sorted(
            set(types_to_try()) - set(CASES) - TRIED - tested_as_parts - tested_as_tables - tested_as_segments - drawn
        )
        == []
    )
