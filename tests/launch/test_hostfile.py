"""keras-ddl run --hostfile: the formats of mpirun, MPICH and Slurm."""

import pytest

from keras_ddl.errors import ConfigError
from keras_ddl.launch.hosts import hostfile


@pytest.mark.parametrize(
    "text, slots, hosts",
    [
        ("# ours\nh0 slots=2\nh1.site slots = 4 max_slots=8 # fast\n\n", None, "h0:2,h1.site:4"),
        ("h0 max_slots=8 slots=3\nh1 slots=2 max-slots=4\n", None, "h0:3,h1:2"),
        ("h0:2\nh1:1\n", None, "h0:2,h1:1"),
        ("h0\nh1\nh0\n", None, "h0:2,h1:1"),
        ("h0\nh1:3\n", 4, "h0:4,h1:3"),
        ("node[01-03,7]:2\n", None, "node01:2,node02:2,node03:2,node7:2"),
        ("r[1-2]n[09-10]\n", None, "r1n09:1,r1n10:1,r2n09:1,r2n10:1"),
    ],
)
def test_hostfile_reads_each_format(tmp_path, text, slots, hosts):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert hostfile.read(path, slots) == hosts


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "at least one host"),
        ("h0 2\n", "line 1"),
        ("h0 slot=2\n", "line 1"),
        ("h0\nh1 slots=0\n", "line 2"),
        ("h0:2\nh0:2\n", "has two"),
        ("h0\nh0:2\n", "has two"),
        ("h[3-1]\n", "ranges"),
        ("h[0-9999]x[0-9999]\n", "at most"),
        ("-o ProxyCommand=x\n", "line 1"),
    ],
)
def test_hostfile_errors_name_the_line(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        hostfile.read(path)


def test_hostfile_may_have_a_byte_order_mark_but_must_be_text(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfh0:2\n")
    assert hostfile.read(path) == "h0:2"
    path.write_bytes(b"h0\xff\xfe:2\n")
    with pytest.raises(ConfigError, match="line 1"):
        hostfile.read(path)
