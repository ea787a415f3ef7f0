"""Published results of trainings on the machines of PowerAI DDL, and the predictions of the cost model for them.

The machines are 64 hosts (IBM Power S822LC) with 4 P100 devices each. The links have their manufacturers' speeds, as in
benchmarks/predict.py: two NVLinks of 20 GB/s between devices, and one port of 100 Gbit/s per host. ASSUMED: 5 us per
message, and devices never wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keras_ddl.cost_model import Step, exchange, machines

DEVICES_PER_HOST, NVLINK, INFINIBAND, LATENCY = 4, 40e9, 12.5e9, 5e-6
DEVICES = (4, 8, 16, 32, 64, 128, 256)

DDL = "arXiv 1708.02188"
TENSORFLOW = "TensorFlow's benchmarks of May 2017, a P100 with synthetic pictures"


@dataclass(frozen=True)
class Network:
    """A network and its training on one device.

    Attributes:
        gradients: bytes of all gradients.
        rows: rows per device and step.
        compute: seconds of a step on one device.
        source: the source of `compute`.
    """

    name: str
    gradients: float
    rows: int
    compute: float
    source: str

    def step(self, devices: int, overlap: float) -> float:
        """Returns the seconds of a step on `devices` devices. overlap: see keras_ddl.cost_model.Step."""
        return Step(self.compute, self.gradients, overlap=overlap).seconds(_cluster(devices))

    def exchange(self, devices: int) -> float:
        """Returns the seconds of the all-reduce of the gradients, without overlap."""
        return exchange(_cluster(devices), self.gradients)


NETWORKS = (
    Network("ResNet-50", 100e6, 32, 32 / 195, f"195 pictures/s at a batch of 32: {TENSORFLOW}"),
    # From ResNet-152's 82.7 pictures/s (same source); the two networks need 11.3 and 7.6 Gflop a picture (1512.03385).
    Network("ResNet-101, 22,000 classes", 350e6, 32, 32 / (82.7 * 11.3 / 7.6), "ASSUMED from ResNet-152's"),
)

# Rows with a description, the network, the devices, one value under the key of a prediction, and its source.
PUBLISHED: tuple[dict[str, Any], ...] = (
    {"what": "all-reduce of 100 MB", "network": "ResNet-50", "devices": 256, "exchange": 23e-3, "source": DDL},
    {"what": "all-reduce of 350 MB", "network": "ResNet-101, 22,000 classes", "devices": 256, "exchange": 100e-3,
     "source": f"{DDL}: less than"},
    {"what": "efficiency with Caffe", "network": "ResNet-50", "devices": 256, "efficiency": 0.95,
     "source": "IBM; top500.org, 8 August 2017"},
    {"what": "the same, Facebook (arXiv 1706.02677)", "network": "ResNet-50", "devices": 256, "efficiency": 0.89,
     "source": "top500.org, 8 August 2017"},
    {"what": "90 epochs with Torch: 50 minutes", "network": "ResNet-50", "devices": 256,
     "step": 50 * 60 / (90 * 1.281167e6 / 8192), "source": f"{DDL}; at 8,192 pictures a step, 1,281,167 in all"},
    {"what": "16 days on 4 devices, 7 hours on 256", "network": "ResNet-101, 22,000 classes", "devices": 256,
     "efficiency": 16 * 24 / 7 / 64,
     "source": "IBM, 'Scaling TensorFlow and Caffe to 256 GPUs'; against 4 devices, from rounded days and hours"},
)  # fmt: skip


def _cluster(devices: int) -> Any:
    return machines(devices, DEVICES_PER_HOST, NVLINK, INFINIBAND, LATENCY)


def predictions() -> list[dict[str, Any]]:
    """Returns a row for each network, number of devices, and share of the computation that may hide the exchange."""
    return [
        {
            "network": network.name,
            "devices": devices,
            "overlap": overlap,
            "exchange": network.exchange(devices),
            "step": network.step(devices, overlap),
            "efficiency": network.compute / network.step(devices, overlap),
        }
        for network in NETWORKS
        for overlap in (0.0, 0.5)
        for devices in DEVICES
    ]
