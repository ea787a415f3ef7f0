"""DDL_OPTIONS and DDL_GROUP_SIZE."""

import pytest

from keras_ddl.ddl.options import Options, group_elements, parse
from keras_ddl.errors import ConfigError
from keras_ddl.topology import parse_mode


def test_parse_options():
    assert parse("-mode p:4x2 -dbg_level 2 -dump_iter 50") == Options("p:4x2", dbg_level=2, dump_iter=50)
    assert parse("--dump_iter 1 -dev_sync 2 -rebind_iter 30") == Options(dump_iter=1, dev_sync=2, rebind_iter=30)
    assert parse("") == Options()


@pytest.mark.parametrize("letter", "prbnmc")
def test_modes_become_boxes_of_the_core(letter):
    assert parse(f"-mode {letter}").mode == "p"
    assert parse(f"-mode {letter}:2x3x1").mode == f"{letter}:2x3x1"  # messages quote the mode as written
    # `keras_ddl.init()` also reads DDL_OPTIONS, unchanged.
    hosts = [0, 0, 1, 1, 2, 2]
    assert parse_mode(f"{letter}:2x3x1", hosts) == parse_mode("x:2x3x1", hosts)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("-mode q:4x2", "'q:4x2'"),
        ("-mode p:4x", "'p:4x'"),
        ("-mode p:0x4", "'p:0x4'"),
        ("-mode", "-mode must be followed"),
        ("-dump_iters 4", "The nearest is -dump_iter."),
        ("mode p", "'mode'"),
        ("-dbg_level 3", "from 0 to 2"),
        ("-dump_iter x", "'x'"),
        ("-mode 'p", "must be words"),
    ],
)
def test_invalid_options_are_named(text, named):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert named in str(caught.value)


def test_group_size_must_be_a_number_of_elements():
    assert group_elements({}) is None
    assert group_elements({"DDL_GROUP_SIZE": "1000"}) == 1000
    for wrong in ("0", "-1", "many"):
        with pytest.raises(ConfigError, match="DDL_GROUP_SIZE"):
            group_elements({"DDL_GROUP_SIZE": wrong})
