"""DistributedDataParallel over keras_ddl: a small network learns scikit-learn's handwritten digits.

    keras-ddl run -np 2 python examples/torch/digits.py

It differs from a script for another backend in one import and the name in init_process_group. Without `keras-ddl run`,
one process trains alone.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import keras_ddl.torch  # noqa: F401  (registers the backend)


def data() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training data and the held-out data."""
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(7))
    x = torch.tensor(pictures / 16, dtype=torch.float32).view(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of all ranks together (default: %(default)s)")
    options = parser.parse_args()

    dist.init_process_group("ddl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(7)

    train, held_out = data()
    sampler = DistributedSampler(train, seed=7)
    loader = DataLoader(train, batch_size=options.batch_size // size, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    with torch.no_grad():
        x, y = held_out[rank::size]
        counts = torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"held-out accuracy {counts[0].item() / counts[1].item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
