"""Steps on hosts and links that are not here, predicted from what was measured and the cost model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keras_ddl.cli.bench_training.rank import Plan
from keras_ddl.cli.bench_training.rounds import Found
from keras_ddl.cost_model import Step, machines
from keras_ddl.errors import ConfigError

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Links:
    """Hosts of equally many devices. Attributes: link, inside: bytes/s of a host and of a device in it; latency: s."""

    hosts: int
    devices: int
    link: float
    inside: float
    latency: float
    text: str


@dataclass(frozen=True)
class Predicted:
    """A step of `ranks` devices on `hosts` hosts. Seconds, and efficiency as measured.Row has it."""

    ranks: int
    hosts: int
    batch: int
    step: float
    rows_per_second: float
    efficiency: float
    text: str


def parse(text: str) -> Links:
    """Returns the links of "hosts=64,devices=4,link=100Gb"; optional: inside=40GB and latency=5us, the defaults.

    b is bits, B is bytes, per second. Raises: ConfigError: not such a text.
    """
    given = {"devices": "1", "inside": "40GB", "latency": "5us"}
    for one in text.split(","):
        key, _, value = one.partition("=")
        given[key.strip()] = value.strip()
    try:
        if set(given) != {"hosts", "devices", "link", "inside", "latency"}:
            raise ValueError
        latency = re.fullmatch(r"([0-9.]+) ?([mun]?s)", given["latency"])
        if latency is None:
            raise ValueError
        links = Links(
            int(given["hosts"]),
            int(given["devices"]),
            _bandwidth(given["link"]),
            _bandwidth(given["inside"]),
            float(latency[1]) * _SECONDS[latency[2]],
            ", ".join(f"{key} {given[key]}" for key in ("link", "inside", "latency")),
        )
        if min(links.hosts, links.devices) < 1 or not min(links.link, links.inside) > 0:
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(
            "--predict must be hosts=N,devices=N,link=SPEED and, if wanted, inside=SPEED (of a device in its host) and "
            "latency=TIME (of a message); a speed as in 100Gb (bits/s) or 12.5GB (bytes/s), a time as in 5us. "
            f"Received: {text!r}."
        ) from None
    return links


def _bandwidth(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+) ?([KMGT]?)(b|B)(?:it)?(?:/s|ps)?", text)
    if not match:
        raise ValueError(text)
    return float(match[1]) * _PREFIXES[match[2]] / (8 if match[3] == "b" else 1)


def predicted(plan: Plan, found: Found, links: Links) -> list[Predicted]:
    """Returns steps on 1, 2, 4, ... hosts up to those of `links`.

    step = computing + what of the exchange computing does not hide. Computing is the measured step of one device, in
    strong scaling divided by the devices. The exchange is that of all gradients, dense; hidden is as large a share of
    computing as a byte was submitted, in the largest job measured, before backward ended. That devices wait for each
    other is left out.
    """
    alone = next(row for row in found.rows if row.ranks == 1).step
    largest = max(found.rows, key=lambda row: row.ranks)
    overlap = min(1.0, (largest.lead or 0.0) / largest.step)
    counts = {links.hosts, *(1 << power for power in range(links.hosts.bit_length()) if 1 << power < links.hosts)}
    result = []
    for hosts in sorted(counts):
        ranks = hosts * links.devices
        compute = alone / ranks if plan.strong else alone
        cluster = machines(ranks, links.devices, links.inside, links.link, links.latency)
        seconds = Step(compute, found.gradient_bytes, overlap=overlap).seconds(cluster)
        batch = plan.global_batch(ranks)
        result.append(Predicted(ranks, hosts, batch, seconds, batch / seconds, compute / seconds, links.text))
    return result
