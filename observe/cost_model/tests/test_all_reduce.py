"""Compares the cost model with hand-computed times and with proven bounds from the literature."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from keras_ddl.cost_model import (
    Cluster,
    Dimension,
    box,
    choose,
    halving_doubling,
    mode_for,
    pipelined_box,
    predict,
    recursive_doubling,
    ring,
    scattered_ring,
    shared_memory,
    stages,
)
from keras_ddl.errors import ConfigError
from keras_ddl.topology import parse_mode

MB = 1e6
FAST, NETWORK, UPLINK = 10e9, 1e9, 0.5e9


def cluster_of(*sizes: int, latency: float = 0.0, **options: float) -> Cluster:
    links = (FAST, NETWORK, UPLINK)
    return Cluster(
        tuple(Dimension(n, b, latency if i else 0.0) for i, (n, b) in enumerate(zip(sizes, links))), **options
    )


def seconds_of(cluster: Cluster, nbytes: float, depth: int) -> list[float]:
    return [stage.seconds for stage in stages(cluster, nbytes, depth)]


def test_ring_sends_the_measured_bytes_per_host() -> None:
    # 4 hosts x 2 ranks: 1.75 N per host in host order, 3.5 N with round-robin placement, 1.5 N for the box.
    cluster = Cluster((Dimension(2, math.inf), Dimension(4, NETWORK)))
    assert ring(cluster, 1e9) == pytest.approx(1.75)
    assert scattered_ring(cluster, 1e9) == pytest.approx(3.5)
    assert box(cluster, 1e9, 2) == pytest.approx(1.5)


def test_box_adds_its_stages() -> None:
    inner, outer = seconds_of(cluster_of(4, 8, latency=1e-5), 80 * MB, 2)
    assert inner == pytest.approx(2 * 3 / 4 * 80 * MB / FAST)
    # All four ranks of a host share its link: twice 8 - 1 steps, of 80 / 8 MB per host.
    assert outer == pytest.approx(14 * (10e-6 + 10 * MB / NETWORK))
    assert box(cluster_of(4, 8, latency=1e-5), 80 * MB, 2) == pytest.approx(inner + outer)


def test_three_dimensions_relieve_the_links_between_racks() -> None:
    cluster = cluster_of(2, 2, 2)  # ranks of a host, hosts of a rack, racks
    inside, hosts, racks = seconds_of(cluster, 100 * MB, 3)
    assert inside == pytest.approx(2 * 1 / 2 * 100 * MB / FAST)
    assert hosts == pytest.approx(2 * 1 / 2 * 100 * MB / NETWORK)
    # A rack sends N/2 in each direction. Each of its two hosts sends N/4, which takes no longer than N/2 at 0.5 GB/s.
    assert racks == pytest.approx(2 * 1 / 2 * 100 * MB / UPLINK)
    # One ring through all four hosts sends 1.5 N through a rack's uplink; three dimensions send N.
    assert seconds_of(cluster, 100 * MB, 2)[1] == pytest.approx(2 * 3 / 4 * 100 * MB / UPLINK)


def test_host_links_limit_the_exchange_between_racks() -> None:
    wide = Cluster((Dimension(2, FAST), Dimension(2, 1e9), Dimension(2, 1e12)))
    # Each of the two host links carries N/2, although the rack's link could carry more.
    assert seconds_of(wide, 100 * MB, 3)[2] == pytest.approx(50 * MB / 1e9)


def test_depth_one_is_the_flat_ring() -> None:
    cluster = cluster_of(4, 8, 2, latency=3e-6, reduction=5e9)
    assert box(cluster, 10 * MB, 1) == ring(cluster, 10 * MB)


def test_recursive_doubling_takes_few_large_steps() -> None:
    flat = Cluster((Dimension(1, FAST), Dimension(8, NETWORK, 1e-5)), reduction=4e9)
    assert recursive_doubling(flat, 1 * MB) == pytest.approx(3 * (10e-6 + 1e-3 + 0.25e-3))
    # Five ranks: fold in the fifth (with an addition), two exchanges among four, and fold out.
    five = Cluster((Dimension(1, FAST), Dimension(5, NETWORK, 1e-5)), reduction=4e9)
    assert recursive_doubling(five, 1 * MB) == pytest.approx(4 * (10e-6 + 1e-3) + 3 * 0.25e-3)
    # The two ranks of a host share its link.
    assert recursive_doubling(cluster_of(2, 2), 1 * MB) == pytest.approx(1e-4 + 2e-3)


def test_halving_doubling_sends_ring_bytes_in_fewer_steps() -> None:
    flat = Cluster((Dimension(1, FAST), Dimension(8, NETWORK, 1e-5)), reduction=4e9)
    bytes_term = 2 * 7 / 8 * 8e-3 + 7 / 8 * 2e-3
    assert halving_doubling(flat, 8 * MB) == pytest.approx(2 * 3 * 10e-6 + bytes_term)
    assert ring(flat, 8 * MB) == pytest.approx(2 * 7 * 10e-6 + bytes_term)


def test_pipeline_takes_its_busiest_link_plus_the_first_block() -> None:
    cluster = cluster_of(2, 4)
    inner, outer = seconds_of(cluster, 160 * MB, 2)
    # 4 blocks, of 20 MB of one rank's share.
    piped = pipelined_box(cluster, 160 * MB, 2, shard_bytes=20 * MB)
    assert piped == pytest.approx((inner + outer) / 4 + 3 * max(inner, outer) / 4)
    assert max(inner, outer) < piped < inner + outer
    assert pipelined_box(cluster, 160 * MB, 2, shard_bytes=1e9) == pytest.approx(inner + outer)


def test_pipeline_is_no_faster_than_the_link_its_stages_share() -> None:
    # Hosts and racks both send through the host's link: 2 (G-1)/G N in total for G = 4 hosts.
    cluster = Cluster((Dimension(2, math.inf), Dimension(2, NETWORK), Dimension(2, math.inf)))
    assert pipelined_box(cluster, 100 * MB, 3, shard_bytes=1e3) == pytest.approx(2 * 3 / 4 * 0.1, rel=1e-3)


def test_pipeline_hides_latency_up_to_its_depth() -> None:
    cluster = Cluster((Dimension(1, FAST), Dimension(5, math.inf, 1e-3)))
    # 10 blocks, two at a time, of 8 messages of 1 ms.
    assert pipelined_box(cluster, 10e6, 2, shard_bytes=1e6, ahead=2) == pytest.approx(8e-3 + 9 * 8e-3 / 2)


def test_pipeline_with_too_many_blocks_pays_their_latency() -> None:
    cluster = cluster_of(2, 4, latency=1e-3)
    assert pipelined_box(cluster, 10 * MB, 2, shard_bytes=1e3) > box(cluster, 10 * MB, 2)


def racks_of(hosts: int, racks: int, taper: float) -> Cluster:
    """Returns a cluster with 4 ranks per host. `taper`: total speed of a rack's hosts over the speed of its uplink."""
    uplink = hosts * 12.5e9 / taper
    return Cluster((Dimension(4, 40e9), Dimension(hosts, 12.5e9, 5e-6), Dimension(racks, uplink, 5e-6)))


def test_mode_for_uses_dimensions_that_pay_off() -> None:
    # The uplink is half as fast as one host's link: separate rings send N bytes through it instead of 1.5 N.
    assert mode_for(racks_of(2, 2, taper=4), 100 * MB) == "x:4x2x2"
    assert mode_for(racks_of(16, 64, taper=4), 100 * MB) == "x:4x16x64"
    # Two large racks, whose uplink one ring does not fill: a third stage only delays the first block.
    assert mode_for(racks_of(16, 2, taper=16), 100 * MB) == "x:4x32"
    assert mode_for(Cluster((Dimension(2, FAST), Dimension(4, NETWORK))), 100 * MB) == "x:2x4"
    assert mode_for(Cluster((Dimension(4, FAST),)), MB) == "x:4"
    assert mode_for(Cluster((Dimension(1, FAST), Dimension(4, NETWORK))), 100 * MB) == "x:1x4"


def test_modes_are_valid_for_topology() -> None:
    for cluster in (racks_of(2, 2, 4), racks_of(16, 2, 16), Cluster((Dimension(4, FAST),))):
        hosts = [rank // 4 for rank in range(cluster.size)]
        dims, group = parse_mode(mode_for(cluster, MB), hosts)
        assert math.prod(dims) == cluster.size == len(group)


def test_choose_takes_few_steps_for_small_messages_and_few_bytes_for_large() -> None:
    cluster = cluster_of(4, 64, latency=2e-6)
    everything = predict(cluster, 1.0)
    assert choose(cluster, 64, everything) == "recursive doubling"
    assert choose(cluster, 1e9, everything) == "2-d pipelined"
    seconds = predict(cluster, 1e9)
    assert seconds["2-d pipelined"] < seconds["2-d"] < seconds["scattered ring"]


def test_choose_uses_only_the_given_names() -> None:
    cluster = cluster_of(4, 64, 4, latency=2e-6)
    assert choose(cluster, 8) == "3-d pipelined"  # fewest steps among the engine's algorithms
    assert choose(cluster, 8, ["ring", "2-d"]) == "2-d"


def test_more_hosts_slow_a_flat_ring_more_than_the_box() -> None:
    def at(racks: int, name: str) -> float:
        links = (Dimension(4, 40e9, 1e-6), Dimension(16, 12.5e9, 2e-6), Dimension(racks, 16 * 12.5e9, 3e-6))
        return predict(Cluster(links), 100 * MB, [name])[name]

    assert at(64, "ring") > at(4, "ring") + 2 * 4 * 16 * 60 * 2e-6 * 0.99
    assert at(64, "3-d") < at(4, "3-d") * 1.05


@pytest.mark.parametrize("nbytes", [0, 1, 1e9])
def test_one_rank_takes_no_time(nbytes: float) -> None:
    alone = Cluster((Dimension(1, FAST), Dimension(1, NETWORK, 1e-5)))
    assert set(predict(alone, nbytes).values()) == {0.0}


@pytest.mark.parametrize("name", list(predict(cluster_of(3, 5, 7), 1.0)))
def test_times_grow_with_bytes_latency_and_slower_links(name: str) -> None:
    def seconds(nbytes: float = MB, latency: float = 1e-6, speed: float = 1e9, reduction: float = 1e9) -> float:
        dims = tuple(Dimension(n, speed, latency) for n in (3, 5, 7))
        return predict(Cluster(dims, reduction), nbytes, [name])[name]

    usual = seconds()
    assert usual < seconds(nbytes=2 * MB) and usual < seconds(latency=2e-6)
    assert usual < seconds(speed=0.5e9) and usual < seconds(reduction=0.5e9)


@pytest.mark.parametrize(
    "ranks, cores, copies", [(2, None, 2.5), (4, None, 2.375), (4, 2, 4.75), (2, 8, 2.5), (3, 2, 3.5)]
)
def test_shared_memory_counts_memory_passes(ranks: int, cores: int | None, copies: float) -> None:
    host = Cluster((shared_memory(ranks, 10e9, cores),))
    assert ring(host, 1e9) == pytest.approx(copies * 0.1)
    with pytest.raises(ConfigError, match="cores=0"):
        shared_memory(ranks, 10e9, 0)


def test_start_is_added_to_every_prediction() -> None:
    dims = cluster_of(2, 4).dims
    with_start, without = predict(Cluster(dims, start=1e-3), MB), predict(Cluster(dims), MB)
    assert with_start == {name: pytest.approx(seconds + 1e-3) for name, seconds in without.items()}


def test_fit_finds_latency_and_bandwidth() -> None:
    points = [(n, 20e-6 + n / 3e9) for n in (8, 1e3, 1e6, 1e8)]
    link = Dimension.fit(4, points)
    assert (link.size, link.latency, link.bandwidth) == (4, pytest.approx(20e-6), pytest.approx(3e9))


@pytest.mark.parametrize("points", [[], [(8, 1e-6)], [(8, 1e-6), (8, 2e-6)], [(8, 2e-6), (800, 1e-6)]])
def test_fit_refuses_points_without_a_line(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError, match=r"Dimension\.fit"):
        Dimension.fit(4, points)


@pytest.mark.parametrize("values", [(0, 1e9, 0.0), (2, 0.0, 0.0), (2, math.nan, 0.0), (2, 1e9, -1.0)])
def test_dimension_refuses_impossible_links(values: tuple[int, float, float]) -> None:
    with pytest.raises(ConfigError, match="Dimension: size"):
        Dimension(*values)


def test_mistakes_name_the_valid_names() -> None:
    cluster = cluster_of(2, 2)
    with pytest.raises(ConfigError, match="'2-d'.*Received.*'3-d'"):
        predict(cluster, 1.0, ["3-d"])
    with pytest.raises(ConfigError, match="nbytes=-1"):
        predict(cluster, -1)
    with pytest.raises(ConfigError, match="depth"):
        stages(cluster, 1.0, 3)
    with pytest.raises(ConfigError, match="at least one dimension"):
        Cluster(())


def test_predict_program_is_near_the_papers_measurement(tmp_path) -> None:
    program = Path(__file__).resolve().parents[3] / "benchmarks" / "predict.py"
    command = [sys.executable, str(program), "--json", str(tmp_path / "out.json")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "23 ms" in output and "1024" in output
    paper = json.loads((tmp_path / "out.json").read_text())["paper"]
    # A bound without protocol costs: below the measured time, but not far: above 23 ms and below 100 ms.
    assert 0.5 * 0.023 < paper["100"]["3-d"] < 0.023 and paper["350"]["3-d"] < 0.100
