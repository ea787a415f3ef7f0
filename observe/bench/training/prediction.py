"""Predicts steps on other hosts and links, from measurements and the cost model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keras_ddl import parts
from keras_ddl.bench.training.rank import Plan
from keras_ddl.bench.training.rounds import Measurements
from keras_ddl.errors import ConfigError

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Links:
    """Hosts with equal numbers of devices. `link`, `inside`: bytes/s of a host and of a device. `latency`: seconds."""

    hosts: int
    devices: int
    link: float
    inside: float
    latency: float
    text: str


@dataclass(frozen=True)
class Predicted:
    """A predicted step of `ranks` devices on `hosts` hosts. Times in seconds; efficiency as in rounds.Row."""

    ranks: int
    hosts: int
    batch: int
    step: float
    rows_per_second: float
    efficiency: float
    text: str


def parse(text: str) -> Links:
    """Parses "hosts=64,devices=4,link=100Gb"; optional: inside=40GB and latency=5us, the defaults.

    b is bits, B is bytes, per second. Raises: ConfigError: wrong syntax.
    """
    values = {"devices": "1", "inside": "40GB", "latency": "5us"}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        values[key.strip()] = value.strip()
    try:
        if set(values) != {"hosts", "devices", "link", "inside", "latency"}:
            raise ValueError
        latency = re.fullmatch(r"([0-9.]+) ?([mun]?s)", values["latency"])
        if latency is None:
            raise ValueError
        links = Links(
            int(values["hosts"]),
            int(values["devices"]),
            _bandwidth(values["link"]),
            _bandwidth(values["inside"]),
            float(latency[1]) * _SECONDS[latency[2]],
            ", ".join(f"{key} {values[key]}" for key in ("link", "inside", "latency")),
        )
        if min(links.hosts, links.devices) < 1 or not min(links.link, links.inside) > 0:
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(
            "--predict must be hosts=N,devices=N,link=SPEED and, optionally, inside=SPEED (of a device in its host) "
            "and latency=TIME (of a message); a speed as in 100Gb (bits/s) or 12.5GB (bytes/s), a time as in 5us. "
            f"Received: {text!r}."
        ) from None
    return links


def _bandwidth(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+) ?([KMGT]?)(b|B)(?:it)?(?:/s|ps)?", text)
    if not match:
        raise ValueError(text)
    return float(match[1]) * _PREFIXES[match[2]] / (8 if match[3] == "b" else 1)


def predicted(plan: Plan, measurements: Measurements, links: Links) -> list[Predicted]:
    """Returns steps on 1, 2, 4, ... hosts up to the number in `links`.

    step = compute + the part of the exchange that compute does not hide. Compute is the measured step of one device,
    divided by the devices for strong scaling. The exchange is an all-reduce of all gradients as dense tensors. The
    share of compute that can hide it is measured in the largest job: the mean time from a byte's submission to the end
    of the backward pass, over the step. Waiting for other devices is not modelled.

    Raises: DependencyError: the cost_model part is not installed.
    """
    parts.need("cost_model")
    from keras_ddl.cost_model import Step, machines

    alone = next(row for row in measurements.rows if row.ranks == 1).step
    largest = max(measurements.rows, key=lambda row: row.ranks)
    overlap = min(1.0, (largest.lead or 0.0) / largest.step)
    counts = {links.hosts, *(1 << power for power in range(links.hosts.bit_length()) if 1 << power < links.hosts)}
    result = []
    for hosts in sorted(counts):
        ranks = hosts * links.devices
        compute = alone / ranks if plan.strong else alone
        cluster = machines(ranks, links.devices, links.inside, links.link, links.latency)
        seconds = Step(compute, measurements.gradient_bytes, overlap=overlap).seconds(cluster)
        batch = plan.global_batch(ranks)
        result.append(Predicted(ranks, hosts, batch, seconds, batch / seconds, compute / seconds, links.text))
    return result
