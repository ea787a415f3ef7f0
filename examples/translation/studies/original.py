"""Published step times of the original on its machines, and the predictions of keras_ddl.cost_model.

The original is the translating LSTM of TensorFlow's NMT tutorial, trained with IBM's Distributed Deep Learning library
(Seelam, Janssen and Lastras, 2018, developer.ibm.com). It reduces 717 MB of gradients in one operation after the
backward pass, on hosts with 4 devices each and 100 Gbit/s between them.
"""

from __future__ import annotations

import dataclasses

from keras_ddl.cost_model import Cluster, Step, fitted_link, fitted_spread, machines
from translation.studies.rows import Row

PUBLISHED = {1: 0.360, 2: 0.450, 4: 0.560, 8: 0.680, 12: 0.690, 16: 0.700}  # devices -> seconds per step
GRADIENTS, DEVICES_PER_HOST = 717e6, 4


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of the machines.

    Attributes:
        device: bytes/s of a device's link inside its host, each way.
        host: bytes/s of a host's network.
        latency: seconds per message.
    """

    device: float = 40e9
    host: float = 12.5e9
    latency: float = 2e-6

    def cluster(self, devices: int) -> Cluster:
        """Returns a cluster of `devices` devices on full hosts."""
        return machines(devices, DEVICES_PER_HOST, self.device, self.host, self.latency)


def predictions(links: Links, overlap: float = 0.0) -> dict[str, tuple[Step, Links, str]]:
    """Returns, for each way to predict steps, its name -> (step, links, a note on fitted values). overlap: see Step."""
    plain = Step(PUBLISHED[1], GRADIENTS, overlap=overlap)
    waiting = fitted_spread(plain, [(links.cluster(devices), PUBLISHED[devices]) for devices in (2, 4)])
    slower = fitted_link(plain, 4, PUBLISHED[4])
    return {
        "links": (plain, links, "nothing fitted"),
        "links, waiting": (
            dataclasses.replace(plain, spread=waiting),
            links,
            f"standard deviation of computing {1e3 * waiting:.0f} ms, FITTED to 2 and 4 devices",
        ),
        "slower inside hosts": (
            plain,
            dataclasses.replace(links, device=slower),
            f"{slower / 1e9:.1f} GB/s inside hosts, FITTED to 4 devices",
        ),
    }


def table(links: Links, overlap: float = 0.0) -> list[Row]:
    """Returns published and predicted rows, with the errors of the predictions."""
    found = [_row("published", "original", devices, seconds) for devices, seconds in PUBLISHED.items()]
    for name, (step, its_links, note) in predictions(links, overlap).items():
        for devices, published in PUBLISHED.items():
            seconds = step.seconds(its_links.cluster(devices))
            row = _row("predicted", f"original: {name}", devices, seconds)
            found.append(row | {"error %": 100 * (seconds / published - 1), "note": note if devices == 1 else None})
    return found


def _row(how: str, what: str, devices: int, seconds: float) -> Row:
    return {
        "how": how,
        "what": what,
        "ranks": devices,
        "hosts": -(-devices // DEVICES_PER_HOST),
        "step ms": 1e3 * seconds,
        "times one": devices * PUBLISHED[1] / seconds,
        "error %": None,
    }
