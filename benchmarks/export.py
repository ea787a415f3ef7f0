"""Measures how long it takes to export ResNet-50, with and without proof, and how long Keras's model.export() takes.

    python benchmarks/export.py [--rounds 5] [--directory /a/disk]

Contestants take turns in one run. The program prints medians, and medians of the ratios within each round:

    bound                               writing the bytes of the weights to a file that is synced to disk
    in the process that has the model   export_saved_model of a checkpoint; model.export() of the model in memory
    by a command, from files            `keras-ddl export`; a script that loads a .keras file and calls export(): each a
                                        new Python, which imports TensorFlow

keras_ddl's export uses the graph that was written when training began, and the weights of a checkpoint. The line above
the table shows what the graph costs once and what each checkpoint costs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from _rounds import machine
from _smoke import options_of

import keras_ddl
from keras_ddl import export, model_state

KERAS_SCRIPT = """
import sys
import keras
keras.saving.load_model(sys.argv[1]).export(sys.argv[2], verbose=False)
"""


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def write_and_sync(path: Path, arrays: list[np.ndarray]) -> None:
    with path.open("wb") as file:
        for array in arrays:
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")


def size_of(folder: Path) -> float:
    """Returns the size of all files in megabytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def measure(contestants: dict[str, Callable[[], object]], rounds: int, clean: Callable[[], None]) -> dict[str, list]:
    """Returns the seconds of each contestant in each round. The first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, call in contestants.items():
            clean()
            os.sync()  # otherwise this call would pay for writes of the previous contestant
            seconds = seconds_of(call)
            if number:
                found[name].append(seconds)
    return found


def show(found: dict[str, list[float]], peer: str, sizes: dict[str, float]) -> None:
    for name, seconds in found.items():
        speedup = statistics.median(theirs / own for theirs, own in zip(found[peer], seconds))
        size = f"{sizes[name]:8.0f}" if name in sizes else " " * 8
        print(f"  {name:36} {statistics.median(seconds):8.2f} {speedup:12.1f} {size}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", default="ResNet50", help="a network of keras.applications (default: %(default)s)")
    parser.add_argument("--directory", help="where to write; default: the directory for temporary files")
    arguments = options_of(parser, rounds=1, network="MobileNet")
    keras_ddl.init()
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        model = getattr(keras.applications, arguments.network)(weights=None)
        weights = [np.ascontiguousarray(each) for each in model.get_weights()]
        begin = time.perf_counter()
        base = export.write_base_graph(model, root / "ckpt")
        graph = time.perf_counter() - begin
        saved = seconds_of(lambda: model_state.save_checkpoint(model, root / "ckpt", 1, base=base))
        model.save(root / "model.keras")
        targets = {name: root / name for name in ("ours", "theirs", "bound")}

        def clean() -> None:
            for folder in targets.values():
                shutil.rmtree(folder, ignore_errors=True)
            targets["bound"].mkdir()

        def ours(validate: str) -> None:
            export.export_saved_model(root / "ckpt", targets["ours"], validate=validate)

        inside = {
            "bound": lambda: write_and_sync(targets["bound"] / "weights", weights),
            "keras_ddl, without proof": lambda: ours("off"),
            "keras_ddl, with proof": lambda: ours("process"),
            "model.export()": lambda: model.export(str(targets["theirs"]), verbose=False),
        }
        command = [Path(sys.executable).with_name("keras-ddl"), "export", root / "ckpt", targets["ours"]]
        script = root / "export_with_keras.py"
        script.write_text(KERAS_SCRIPT)
        outside = {
            "keras-ddl export --no-verify": lambda: run(*command, "--no-verify"),
            "keras-ddl export": lambda: run(*command),
            "load_model(...).export()": lambda: run(sys.executable, script, root / "model.keras", targets["theirs"]),
        }
        print(machine())
        print(f"base graph, once: {graph:.1f} s; a checkpoint: {saved:.1f} s")
        print(f"  {'':36} {'seconds':>8} {'times faster':>12} {'MB':>8}")
        found = measure(inside, arguments.rounds, clean)
        sizes = {"model.export()": size_of(targets["theirs"])}
        ours("off")
        sizes["keras_ddl, without proof"] = sizes["keras_ddl, with proof"] = size_of(targets["ours"])
        sizes["bound"] = sum(each.nbytes for each in weights) / 1e6
        print("in the process that has the model")
        show(found, "model.export()", sizes)
        print("by a command, from files")
        show(measure(outside, (arguments.rounds + 1) // 2, clean), "load_model(...).export()", {})
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
