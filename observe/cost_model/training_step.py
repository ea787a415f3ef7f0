"""Predicts the time of a training step on several devices: computing, waiting for the slowest, exchanging gradients.

    step = compute + waiting + the part of the exchange that computing does not hide

All devices compute on batches of the same size. If some batches take longer, all devices wait for the last one. The
exchange is the all-reduce of the gradients, as keras_ddl.cost_model predicts it for given links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from keras_ddl.cost_model import all_reduce
from keras_ddl.cost_model.links import Cluster, Dimension


@dataclass(frozen=True)
class Step:
    """The parts of a step.

    Attributes:
        compute: seconds of one device alone, the mean over its batches.
        gradients: bytes of the gradients.
        spread: standard deviation, in seconds, of `compute` between the devices of a step. 0: all take equally long.
        overlap: share of `compute` during which gradients may travel. 0: they are all exchanged after it.
    """

    compute: float
    gradients: float
    spread: float = 0.0
    overlap: float = 0.0

    def seconds(self, cluster: Cluster) -> float:
        waiting = self.spread * expected_largest(cluster.size)
        return self.compute + waiting + max(0.0, exchange(cluster, self.gradients) - self.overlap * self.compute)


def exchange(cluster: Cluster, nbytes: float) -> float:
    """Returns the seconds of an all-reduce of `nbytes` with the fastest algorithm of keras_ddl's engine."""
    if cluster.size == 1:
        return 0.0
    return min(all_reduce.predict(cluster, nbytes, all_reduce.engine_algorithms(cluster)).values())


@cache
def expected_largest(count: int) -> float:
    """Returns the mean of the largest of `count` draws from the standard normal distribution: 0 for 1, 1.77 for 16."""
    # With F the distribution of the largest, the mean is the integral of 1 - F over x > 0 minus that of F over x < 0.
    below, width = NormalDist().cdf, 1 / 256
    places = [(number + 0.5) * width - 8 for number in range(int(16 / width))]
    return sum((x > 0) - below(x) ** count for x in places) * width


def fitted_spread(step: Step, rows: Sequence[tuple[Cluster, float]]) -> float:
    """Returns the `spread` with which `step` explains the times of `rows`, (cluster, seconds), best (least squares)."""
    weights = [expected_largest(cluster.size) for cluster, _ in rows]
    beyond = [seconds - step.seconds(cluster) for cluster, seconds in rows]
    return sum(map(float.__mul__, weights, beyond)) / sum(weight**2 for weight in weights)


def fitted_link(step: Step, devices: int, seconds: float) -> float:
    """Returns the bandwidth inside a host, in bytes/s, at which a step on `devices` of its devices takes `seconds`.

    It assumes a ring of L devices, each of which sends 2 (L-1)/L of the gradients.
    """
    return 2 * (devices - 1) / devices * step.gradients / (seconds - step.compute)


def machines(devices: int, devices_per_host: int, device_link: float, host_link: float, latency: float) -> Cluster:
    """Returns `devices` devices on full hosts. Links: bytes/s of one device in its host, and of a host; latency: s."""
    hosts = -(-devices // devices_per_host)
    if hosts == 1:
        return Cluster((Dimension(devices, device_link, latency),))
    return Cluster((Dimension(devices // hosts, device_link, latency), Dimension(hosts, host_link, latency)))
