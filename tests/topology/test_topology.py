import pytest

from keras_ddl.errors import ConfigError
from keras_ddl.topology import make_topology, parse_mode, part_of


def test_mode_p_groups_ranks_by_host():
    assert parse_mode("p", (0, 0, 1, 1)) == ((2, 2), (0, 0, 2, 2))
    assert parse_mode("p", (0, 1, 0, 1)) == ((2, 2), (0, 1, 0, 1))
    assert parse_mode("p", (0,)) == ((1, 1), (0,))
    assert parse_mode("p", (0, 0, 1)) == ((), (0, 0, 2)), "no box if hosts have different numbers of ranks"


@pytest.mark.parametrize(
    ("mode", "dims", "group"),
    [
        ("x:4x1", (4, 1), (0, 0, 0, 0)),
        ("x:2x1x2", (2, 1, 2), (0, 0, 2, 2)),
        ("2x2", (2, 2), (0, 0, 2, 2)),
        ("r:4", (4,), (0, 0, 0, 0)),
        ("b:1x2x2", (1, 2, 2), (0, 1, 2, 3)),
    ],
)
def test_forced_mode_groups_consecutive_ranks(mode, dims, group):
    assert parse_mode(mode, (0, 0, 0, 0)) == (dims, group)


@pytest.mark.parametrize("mode", ["", "x:", "x:0x4", "x:2x", "y:2x2", "x:-2x-2", "p2", "x:2x2 "])
def test_parse_mode_refuses_unknown_modes(mode):
    with pytest.raises(ConfigError, match="Received: mode="):
        parse_mode(mode, (0, 0, 0, 0))


def test_parse_mode_refuses_a_product_that_is_not_the_size():
    with pytest.raises(ConfigError, match=r"number of ranks \(4\)\. Received: mode='x:2x3' \(product 6\)\. Use 'p'"):
        parse_mode("x:2x3", (0, 0, 0, 0))


def test_parse_mode_refuses_shared_memory_across_hosts():
    with pytest.raises(ConfigError, match="rank 0 is on host 0 and rank 2 on host 1"):
        parse_mode("x:4x1", (0, 0, 1, 1))
    with pytest.raises(ConfigError, match="rank 0 is on host 0 and rank 1 on host 1"):
        parse_mode("x:2x2", (0, 1, 0, 1))


HOSTS = [host for host in "abcd" for _ in range(2)]


@pytest.mark.parametrize(
    ("racks", "dims"),
    [
        ("sssstttt", (2, 2, 2)),
        ("ssttuuvv", (2, 4)),  # racks of one host
        ("ssssssss", (2, 4)),
        ("ssttsstt", (2, 4)),  # ranks are not numbered rack by rack
        ("sssssstt", (2, 4)),  # racks of different size
    ],
)
def test_racks_of_equal_size_become_a_dimension(racks, dims):
    assert make_topology(0, HOSTS, "p", list(racks)).dims == dims
    assert make_topology(0, HOSTS, "x:2x4", list(racks)).dims == (2, 4)


def test_racks_change_nothing_when_hosts_differ_in_ranks():
    assert make_topology(0, HOSTS[1:], "p", list("ssstttt")).dims == ()


@pytest.mark.parametrize(
    ("racks", "received"),
    [
        (["s", "t", "t"], "'s' on rank 0 and 't' on rank 1"),
        (["s", "s", None], "'s' on rank 0 and None on rank 2"),
        ([None, None, "s"], "None on rank 0 and 's' on rank 2"),
    ],
)
def test_make_topology_refuses_racks_that_contradict_each_other(racks, received):
    with pytest.raises(ConfigError, match=f"set on all hosts or on none. Received: {received}"):
        make_topology(0, ["a", "a", "b"], "p", racks)


def test_make_topology_numbers_hosts_and_places_the_rank():
    topology = make_topology(2, ["b", "a", "b", "a", "b"])
    assert topology.hosts == (0, 1, 0, 1, 0)
    assert (topology.size, topology.num_hosts) == (5, 2)
    assert (topology.local_rank, topology.local_size) == (1, 3)
    assert topology.group == (0, 1, 0, 1, 0)


def test_local_rank_follows_the_host_in_a_forced_mode():
    places = [make_topology(rank, ["a"] * 4, "x:1x4") for rank in range(4)]
    assert [place.local_rank for place in places] == [0, 1, 2, 3]
    assert {place.local_size for place in places} == {4}
    assert {place.num_hosts for place in places} == {1}


def test_part_of_keeps_hosts_and_shared_memory_and_renumbers_ranks():
    whole = make_topology(5, ["a", "a", "b", "b", "c", "c"])
    part = part_of(whole, [5, 1, 4, 3])
    assert (part.rank, part.size) == (0, 4)
    assert part.hosts == (0, 1, 0, 2)
    assert part.group == (0, 1, 0, 3)
    assert part.dims == (), "hosts with two, one and one ranks form no box"
    assert (part.local_rank, part.local_size, part.num_hosts) == (0, 2, 3)
    assert part_of(whole, [1, 3, 5]).dims == (1, 3)
    assert part_of(whole, [0, 1, 4, 5]).dims == (2, 2)


@pytest.mark.parametrize(
    ("ranks", "dims"),
    [
        ([0, 1, 2, 3, 8, 9, 10, 11], (2, 2, 2)),  # two hosts per rack
        ([0, 1, 2, 3, 10, 11, 12, 13], (2, 2, 2)),  # but different positions in the racks
        ([15, 13, 11, 5, 3, 1], (1, 3, 2)),  # in reverse, one rank per host
        ([0, 2, 4, 8, 10], (1, 5)),  # three hosts of one rack, two of the other
        ([0, 8, 2, 10], (1, 4)),  # rank by rack
        ([0, 1, 2, 3], (2, 2)),  # one rack
        ([0, 1, 2, 4, 8, 9, 10, 12], ()),  # hosts with two ranks and with one
    ],
)
def test_part_of_keeps_racks_that_still_form_a_dimension(ranks, dims):
    whole = make_topology(ranks[0], [host for host in "abcdefgh" for _ in range(2)], "p", list("s" * 8 + "t" * 8))
    assert whole.dims == (2, 4, 2)
    part = part_of(whole, ranks)
    assert part.dims == dims
    assert part_of(part, range(len(ranks))).dims == dims


def test_part_of_a_box_of_four_dimensions_keeps_those_it_can():
    whole = make_topology(8, ["a"] * 16, "x:2x2x2x2")
    assert part_of(whole, [0, 1, 2, 3, 8, 9, 10, 11]).dims == (2, 2, 2)
    assert part_of(whole, [0, 2, 4, 8, 10, 14]).dims == (1, 3, 2), "uneven in the second dimension, even in the third"
    assert part_of(whole, range(16)).dims == (2, 2, 2, 2)
    assert part_of(part_of(whole, range(8, 16)), [0]).dims == (1, 1)


def test_part_of_a_forced_box_shares_memory_only_as_the_box():
    whole = make_topology(2, ["a"] * 4, "x:2x2")
    assert part_of(whole, [1, 2]).group == (0, 1)
    assert part_of(whole, [2, 3]).group == (0, 0)
    assert part_of(part_of(whole, [3, 2, 1]), [1, 0]).group == (0, 0)


@pytest.mark.parametrize(("mode", "plain"), [("p", "p"), ("x:2x1", "x:2x1"), ("2x1", "x:2x1"), ("b:2x1", "x:2x1")])
def test_topology_has_one_spelling_of_a_mode(mode, plain):
    assert make_topology(0, ["h0", "h0"], mode).mode == plain
