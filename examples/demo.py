"""Trains on 2 ranks, shows the curve, exports, and predicts in a clean process; `make demo` runs it.

    python examples/demo.py

Prints each stage's command, which a person would type, and its time. Exits with 1 if a stage fails, or if the exported
model is right about fewer than 97% of the held-out images.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parent
OWNED = ".made-by-the-demo"  # marks a folder that the next demo may replace
BAR_WIDTH = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, dest="ranks", help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output-dir", type=Path, default=Path("demo-output"))
    parser.add_argument("--minimum-accuracy", type=float, default=0.97)
    arguments = parser.parse_args()

    output = fresh_folder(arguments.output_dir)
    seconds = {}
    keras_ddl = [Path(sys.executable).with_name("keras-ddl")]
    train = ["python", EXAMPLES / "digits.py", "--epochs", arguments.epochs, "--output-dir", output]
    seconds["train"] = stage("Train", [*keras_ddl, "run", "-np", arguments.ranks, *train])
    print_curve(output / "history.csv")
    seconds["export"] = stage("Export", [*keras_ddl, "export", output / "ckpt", output / "saved_model"])
    predict = [EXAMPLES / "predict_saved_model.py", output / "saved_model", output / "held_out.npz"]
    predict += ["--minimum-accuracy", arguments.minimum_accuracy]
    seconds["predict"] = stage("Predict in a clean process", [sys.executable, *predict])

    print("\n== Time")
    for name, value in [*seconds.items(), ("all", sum(seconds.values()))]:
        print(f"{name:8} {value:6.1f} s")


def fresh_folder(path: Path) -> Path:
    """Empties and returns the folder; refuses a non-empty folder that no earlier demo has made."""
    if path.exists() and any(path.iterdir()) and not (path / OWNED).exists():
        sys.exit(f"--output-dir must be new, empty or an earlier demo's. Received: {path}. Give another one.")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / OWNED).touch()
    return path


def stage(title: str, command: list[object]) -> float:
    """Shows and runs a command; returns its seconds."""
    words = [str(word) for word in command]
    shown = shlex.join([Path(words[0]).name, *words[1:]])
    print(f"\n== {title}\n$ {shown}", flush=True)
    start = time.perf_counter()
    # Hides TensorFlow's startup messages about the CPU and oneDNN, but not errors.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    status = subprocess.run(words, env={**quiet, **os.environ}, check=False).returncode
    if status:
        sys.exit(f"{title} failed with exit status {status}.")
    return time.perf_counter() - start


def print_curve(path: Path) -> None:
    """Prints the global metrics of each epoch, and the validation loss as bars."""
    with path.open() as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    top = max(row["val_loss"] for row in rows)
    print("\n== Training curve (over all ranks)")
    print("epoch  rate    loss    accuracy  val_loss  val_accuracy")
    for row in rows:
        bar = "#" * max(1, round(BAR_WIDTH * row["val_loss"] / top))
        print(
            f"{int(row['epoch']) + 1:5}  {row['learning_rate']:.4f}  {row['loss']:.4f}  {row['accuracy']:8.4f}"
            f"  {row['val_loss']:8.4f}  {row['val_accuracy']:12.4f}  {bar}"
        )


if __name__ == "__main__":
    main()
