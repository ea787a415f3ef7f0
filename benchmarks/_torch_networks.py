"""The PyTorch versions of keras_ddl.bench's networks (observe/bench/training/networks.py), for torch_ddp.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Network(NamedTuple):
    """A network, the shape of a rank's rows in a step, and the number of classes."""

    make: Callable[[], nn.Module]
    rows: tuple[int, ...]
    classes: int


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int, into: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, inside, 1, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(),
            nn.Conv2d(inside, inside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(),
            nn.Conv2d(inside, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.side = nn.Identity()
        if stride > 1 or into != outside:
            self.side = nn.Sequential(nn.Conv2d(into, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.side(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    into = 64
    for inside, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(_Bottleneck(inside, 4 * inside, into, stride if block == 0 else 1))
            into = 4 * inside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000))


NETWORKS = {
    "cnn": Network(cnn, (32, 3, 28, 28), 10),
    "mlp": Network(mlp, (32, 2048), 10),
    "resnet": Network(resnet50, (4, 3, 64, 64), 1000),
}
