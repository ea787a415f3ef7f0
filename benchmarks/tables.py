"""Trains a recommender (DLRM) whose embedding tables are in shards: step time, memory, bytes, and the weights.

    python benchmarks/tables.py --whole                                         # exactness, memory, bytes, times, links
    python benchmarks/tables.py --rows 1000000 4000000 --optimizer SGD          # 2 ranks on this host
    python benchmarks/tables.py --tables 26 --rows 10000 --ranks 3 --steps 200 --exact
    python benchmarks/tables.py --rows 1000000 --rate 1gbit                     # each rank on an emulated host, as root

Contestants take turns in one run, each time as fresh processes:

    one process  plain Keras
    gathered     Strategy(sharding="weights") with tables gathered in each step, as other weights are
    layout       Strategy(layout=ranks): tables are cut along the model axis, so all ranks see the same rows
    rows         Strategy(sharding="weights"): rows of the tables move
    torch        EmbeddingBag in DistributedDataParallel over gloo, a whole table on each rank, if torch is installed
    torchrec     TorchRec over gloo, each table on one rank, with SGD, if torchrec and fbgemm-gpu-cpu are installed

Ids follow Zipf's law. step = median of the steps on the slowest rank, after the first two. peak = VmHWM of the largest
rank, less its memory before the model was made; "of share" is its relation to 1/ranks of the tables and their slots.
bytes = what the exchanges of a step of "rows" are given on all ranks, with rows for themselves, counted while it runs;
bound = the distinct rows of each rank, there and back, and their ids. With --rate: link = bytes that the busiest rank
sends to others, at that rate, and the step on one host. difference = of all weights from those of one process, with
--exact in float64.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from _emulated_cluster import ClusterUnavailable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
MARK = "tables.py: "
IDS = 8  # bytes of an id
COUNTED = 3  # steps whose bytes are counted


def memory(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def batches(settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids [lines, tables, hot], numbers [lines, 13] and labels of all steps."""
    rng = np.random.default_rng(0)
    lines = settings["batch"] * settings["steps"]
    ids = rng.zipf(1.2, (lines, settings["tables"], settings["hot"])) % settings["rows"]
    return ids, rng.normal(size=(lines, 13)), (rng.random((lines, 1)) > 0.5).astype("float64")


def dlrm(settings: dict[str, Any]) -> Any:
    import keras

    layers, width = keras.layers, settings["width"]
    ids = keras.Input((settings["tables"], settings["hot"]), dtype="int64")
    numbers = keras.Input((13,))
    rows = [
        keras.ops.sum(layers.Embedding(settings["rows"], width)(ids[:, place]), axis=1)
        for place in range(settings["tables"])
    ]
    bottom = layers.Dense(width, activation="relu")(layers.Dense(64, activation="relu")(numbers))
    stacked = keras.ops.stack([*rows, bottom], axis=1)
    pairs = layers.Flatten()(layers.Dot(axes=(2, 2))([stacked, stacked]))
    top = layers.Dense(64, activation="relu")(layers.Concatenate()([pairs, bottom]))
    model = keras.Model([ids, numbers], layers.Dense(1)(top))
    optimizer = getattr(keras.optimizers, settings["optimizer"])(1e-2)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    return model


def train(settings: dict[str, Any]) -> None:
    """One contestant on this rank; rank 0 prints what was measured. COLLECTIVE."""
    import keras

    import keras_ddl
    from keras_ddl.bench.training.step_times import StepTimes
    from keras_ddl.cut.shards.table_rows import TableRows

    contestant = settings["contestant"]
    if settings["rows"] * settings["width"] < 1 << 17:  # else these tables are too small for shards
        os.environ.setdefault("KERAS_DDL_SHARD_FROM_ELEMENTS", str(settings["rows"] * settings["width"]))
    keras.config.set_floatx("float64" if settings["exact"] else "float32")
    keras.utils.set_random_seed(1)
    if contestant == "gathered":
        mock.patch.object(TableRows, "takes_less", lambda *args, **options: False).start()
    strategy = None
    if contestant != "one process":
        options = {"layout": settings["ranks"]} if contestant == "layout" else {"sharding": "weights"}
        strategy = keras_ddl.Strategy(**options)
    sent = counted() if settings["counts"] and contestant == "rows" else []
    before = memory("VmRSS")
    if strategy is None:
        model = dlrm(settings)
    else:
        with strategy.scope():
            model = dlrm(settings)
    watch = StepTimes()
    ids, numbers, labels = batches(settings)
    model.fit([ids, numbers], labels, batch_size=settings["batch"], shuffle=False, verbose=0, callbacks=[watch])
    found = [statistics.median(watch.seconds[2:] or watch.seconds), memory("VmHWM") - before]
    found += [sum(each) / settings["steps"] for each in zip(*sent)] or [0.0, 0.0]
    if settings["exact"] and not settings["counts"]:
        save_weights(settings, strategy, model)
    told = [found] if strategy is None else keras_ddl.all_gather_object(found, name="bench/found")
    if strategy is None or strategy.rank == 0:
        seconds, peaks, given, to_others = zip(*told)
        print(MARK + json.dumps([max(seconds), max(peaks), sum(given), max(to_others)]), flush=True)


def counted() -> list[tuple[float, float]]:
    """Counts what exchanges are given from now on. Returns (bytes, bytes for other ranks) of each, while they run."""
    import tensorflow as tf

    from keras_ddl.cut.values.collectives import StepCollectives

    sent: list[tuple[float, float]] = []
    all_to_all = StepCollectives.all_to_all

    def counting(collectives: Any, tensor: Any, splits: Any, name: str, depths: Any = None) -> Any:
        def note(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
            share = 1 - counts[collectives.rank] / max(1, len(rows))
            sent.append((float(rows.nbytes), float(rows.nbytes * share)))
            return rows

        noted = tf.numpy_function(note, [tensor, splits], tensor.dtype)
        noted.set_shape(tensor.shape)
        return all_to_all(collectives, noted, splits, name, depths)

    mock.patch.object(StepCollectives, "all_to_all", counting).start()
    return sent


def save_weights(settings: dict[str, Any], strategy: Any, model: Any) -> None:
    """Writes all weights and slots to a file of this contestant. COLLECTIVE."""
    if strategy is None:
        values = [np.asarray(each) for each in [*model.variables, *model.optimizer.variables]]
    else:
        with strategy.whole_model(model):
            values = [np.asarray(each) for each in [*model.variables, *model.optimizer.variables]]
    if strategy is None or strategy.rank == 0:
        np.savez(Path(settings["folder"], settings["contestant"] + ".npz"), *values)


def train_torch(settings: dict[str, Any]) -> None:
    """The same network in PyTorch: whole tables with dense gradients, or TorchRec's tables. COLLECTIVE."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import keras_ddl

    keras_ddl.init()
    rank, size = keras_ddl.rank(), keras_ddl.size()
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}  # TorchRec reads them
    os.environ.update({name: str(value) for name, value in ranks.items()})
    dist.init_process_group("gloo", init_method=f"file://{settings['folder']}/gloo", rank=rank, world_size=size)
    before, width, count = memory("VmRSS"), settings["width"], settings["tables"]
    is_torchrec = settings["contestant"] == "torchrec"

    class Bags(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bags = [torch.nn.EmbeddingBag(settings["rows"], width, mode="sum") for _ in range(count)]
            self.bags = torch.nn.ModuleList(bags)

        def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
            return [bag(ids[:, n]) for n, bag in enumerate(self.bags)]

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = torchrec_tables(settings) if is_torchrec else Bags()
            bottom = (torch.nn.Linear(13, 64), torch.nn.ReLU(), torch.nn.Linear(64, width), torch.nn.ReLU())
            self.bottom = torch.nn.Sequential(*bottom)
            top = (torch.nn.Linear((count + 1) ** 2 + width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
            self.top = torch.nn.Sequential(*top)

        def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            bottom = self.bottom(numbers)
            stacked = torch.stack([*self.tables(ids), bottom], dim=1)
            pairs = (stacked @ stacked.transpose(1, 2)).flatten(1)
            return self.top(torch.cat([pairs, bottom], dim=1))

    model = torchrec_model(Network(), size) if is_torchrec else DistributedDataParallel(Network())
    own = [each for name, each in model.named_parameters() if not is_torchrec or ".tables." not in name]
    optimizer = getattr(torch.optim, settings["optimizer"])(own, lr=1e-2)  # TorchRec updates its tables itself
    data = [torch.from_numpy(each) for each in batches(settings)]
    seconds, batch = [], settings["batch"]
    for begin in range(0, batch * settings["steps"], batch):
        ids, numbers, labels = (each[begin + rank : begin + batch : size] for each in data)
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model(ids, numbers.float())
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    found = [statistics.median(seconds[2:] or seconds), memory("VmHWM") - before, 0.0, 0.0]
    told = keras_ddl.all_gather_object(found, name="bench/found")
    if rank == 0:
        print(MARK + json.dumps([max(each) for each in zip(*told)]), flush=True)


def torchrec_tables(settings: dict[str, Any]) -> Any:
    """Returns a module that looks up tables which TorchRec will divide."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    names = [f"ids{place}" for place in range(settings["tables"])]
    sizes = {"num_embeddings": settings["rows"], "embedding_dim": settings["width"]}
    configs = [EmbeddingBagConfig(name=f"table_{name}", feature_names=[name], **sizes) for name in names]

    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection(configs, device=torch.device("meta"))

        def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
            lengths = torch.full((ids.shape[0] * len(names),), ids.shape[2])
            rows = self.bags(KeyedJaggedTensor(names, ids.transpose(0, 1).reshape(-1), lengths=lengths))
            return [rows[name] for name in names]

    return Tables()


def torchrec_model(network: Any, size: int) -> Any:
    """Puts each table on one rank: TorchRec cuts no rows on CPUs, and has no Adam there."""
    import torch
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    sharders = [EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1e-2})]
    names = [each.name for each in network.tables.bags.embedding_bag_configs()]
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in names}
    planner = EmbeddingShardingPlanner(Topology(world_size=size, compute_device="cpu"), constraints=constraints)
    plan = planner.collective_plan(network, sharders, dist.group.WORLD)
    return DistributedModelParallel(network, device=torch.device("cpu"), plan=plan, sharders=sharders)


def measured(settings: dict[str, Any]) -> list[float]:
    """Runs one contestant in fresh processes; returns its step time, its peak, and the bytes of its exchanges: of all
    ranks, and of the busiest one for other ranks."""
    ranks = 1 if settings["contestant"] == "one process" else settings["ranks"]
    if settings["rate"] and ranks > 1:
        from _emulated_cluster import EmulatedCluster
        from cluster import launch

        with EmulatedCluster(ranks, settings["rate"]) as cluster:
            return launch(cluster, [1] * ranks, settings, 3600, "tables.py", mark=MARK)
    command = [sys.executable, __file__, json.dumps(settings)]
    if ranks > 1:
        command = [sys.executable, "-m", "keras_ddl.cli", "run", "-np", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True)
    line = next((each for each in done.stdout.splitlines() if MARK in each), None)
    if line is None:
        sys.exit(f"{settings['contestant']} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: list[float] = json.loads(line.split(MARK, 1)[1])
    return found


def bound(settings: dict[str, Any]) -> float:
    """Returns the bytes of the distinct rows of all ranks, there and back, and of their ids, in one of the steps that
    are counted."""
    steps, batch, ranks = min(COUNTED, settings["steps"]), settings["batch"], settings["ranks"]
    ids = batches(settings)[0].reshape(settings["steps"], batch, settings["tables"], -1)[:steps]
    parts = [part for each in ids for part in np.array_split(each, ranks)]
    distinct = sum(len(np.unique(part[:, place])) for part in parts for place in range(settings["tables"]))
    return distinct * (2 * row_bytes(settings) + IDS) / steps


def row_bytes(settings: dict[str, Any]) -> int:
    bytes_: int = settings["width"] * (8 if settings["exact"] else 4)
    return bytes_


def difference(folder: str, contestant: str) -> str:
    """Returns the largest difference of a contestant's weights from those of one process."""
    files = [np.load(Path(folder, f"{name}.npz")) for name in (contestant, "one process")]
    gaps = [np.abs(files[0][name] - files[1][name]).max() for name in files[0].files]
    return f"{max(gaps):.1e}"


def table(settings: dict[str, Any], found: dict[str, list[float]], one_host: float | None = None) -> None:
    """Prints what was measured for one number of rows. one_host: seconds of a step of "rows" without links."""
    slots = {"Adam": 3, "Ftrl": 3, "Adagrad": 2}.get(settings["optimizer"], 1)
    whole = settings["tables"] * settings["rows"] * row_bytes(settings) * slots
    share = whole / settings["ranks"]
    where = f", hosts linked at {settings['rate']}" if settings["rate"] else ""
    print(
        f"\n{settings['tables']} x {settings['rows']:,} rows, {settings['optimizer']}, {settings['ranks']} ranks{where}"
        f"; tables and slots {whole / 1e6:,.0f} MB, a share {share / 1e6:,.0f} MB"
    )
    base = found.get("one process")
    for name, (seconds, peak, given, to_others) in found.items():
        relative = f"  step {seconds / base[0]:.2f} of one process" if base and name != "one process" else ""
        exact = (
            f"  difference {difference(settings['folder'], name)}" if settings["exact"] and "torch" not in name else ""
        )
        if given:
            relative += f"  {given:,.0f} bytes, {given / bound(settings):.2f} of the bound"
        if settings["rate"] and given and one_host is not None:
            link = one_host + 8 * to_others / RATES[settings["rate"]]
            relative += f"  {seconds / link:.2f} of the link's {1e3 * link:.1f} ms"
        print(
            f"{name:>12} {1e3 * seconds:>9.1f} ms {peak / 1e6:>7.0f} MB at the peak, {peak / share:.2f} of share"
            f"{relative}{exact}",
            flush=True,
        )


RATES = {"1gbit": 1e9, "10gbit": 1e10}


def compare(settings: dict[str, Any], chosen: list[str], one_host: float | None = None) -> dict[str, list[float]]:
    """Lets contestants take turns, and prints a table of their medians, which it returns."""
    taking_part = [name for name in chosen if name != "torchrec" or settings["optimizer"] == "SGD"]
    rounds: dict[str, list[list[float]]] = {name: [] for name in taking_part}
    for _ in range(settings["rounds"]):
        for name, found in rounds.items():
            found.append(measured({**settings, "contestant": name}))
            Path(settings["folder"], "gloo").unlink(missing_ok=True)
    medians = {name: [statistics.median(e) for e in zip(*found)] for name, found in rounds.items()}
    if "rows" in chosen:  # counted apart, because counting takes time
        few = {"rate": "", "counts": True, "steps": min(COUNTED, settings["steps"])}
        again = measured({**settings, "contestant": "rows", **few})
        medians["rows"][2:] = again[2:]
    table(settings, medians, one_host)
    return medians


def everything(settings: dict[str, Any], chosen: list[str], smaller: int) -> None:
    """Compares at the sizes that recommenders have, divided by `smaller`."""
    exact = {"exact": True, "tables": 26, "rows": max(200, 5000 // smaller), "width": 8, "rounds": 1}
    for ranks in (2, 3, 4):
        only = {**settings, **exact, "ranks": ranks, "steps": max(4, 200 // smaller), "batch": 63}
        compare(only, [each for each in chosen if each in ("one process", "rows")])
    large = {**settings, "ranks": 4, "tables": 4, "rows": 2_600_000 // smaller, "optimizer": "Adam", "rounds": 1}
    compare(large, [each for each in chosen if each == "rows"])
    for rows in (1_000_000 // smaller, 4_000_000 // smaller):
        compare({**settings, "rows": rows}, chosen)
    on_links = {**settings, "tables": 26, "rows": 100_000 // smaller, "batch": 1024, "optimizer": "SGD"}
    one_host = compare(on_links, [each for each in chosen if each not in ("gathered", "layout")])["rows"][0]
    for rate in RATES:
        try:
            compare({**on_links, "rate": rate}, ["rows"], one_host)
        except ClusterUnavailable as error:
            print(f"hosts linked at {rate} cannot be emulated here: {error}")


def main() -> None:
    from _smoke import options_of

    contestants = ["one process", "gathered", "layout", "rows", "torch", "torchrec"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--tables", type=int, default=1, help="number of tables (default: 1)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000], help="of each table (default: 1000000)")
    parser.add_argument("--width", type=int, default=32, help="of a row (default: 32)")
    parser.add_argument("--hot", type=int, default=4, help="ids of a line for each table (default: 4)")
    parser.add_argument("--batch", type=int, default=64, help="lines of all ranks in a step (default: 64)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a round (default: 12)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant (default: 3)")
    parser.add_argument("--optimizer", default="Adam", help="Adam, Adagrad, SGD or Ftrl (default: Adam)")
    parser.add_argument("--rate", default="", help="of the links of emulated hosts: 1gbit, 10gbit (default: one host)")
    parser.add_argument("--exact", action="store_true", help="train in float64 and compare the weights")
    parser.add_argument("--only", nargs="+", choices=contestants, default=contestants, help="(default: all)")
    parser.add_argument("--whole", action="store_true", help="compare all that this program can, at fixed sizes")
    parser.add_argument("--smaller", type=int, default=1, help="with --whole: divides sizes and steps (default: 1)")
    options = options_of(parser, rows=[2000], width=4, steps=2, rounds=1, only=["one process", "rows"], exact=True)
    chosen = [each for each in options.only if "torch" not in each or importlib.util.find_spec(each) is not None]
    with tempfile.TemporaryDirectory() as folder:
        settings = {**vars(options), "folder": folder, "mark": MARK, "counts": False}
        if options.whole:
            everything({**settings, "rate": "", "exact": False}, chosen, options.smaller)
        else:
            for rows in options.rows:
                compare({**settings, "rows": rows}, chosen)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        chosen_settings = json.loads(sys.argv[1])
        (train_torch if "torch" in chosen_settings["contestant"] else train)(chosen_settings)
    else:
        main()
