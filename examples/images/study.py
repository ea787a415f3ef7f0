"""Runs the study of examples/images/README.md in pieces. Results that are already in study.json are not repeated.

    python examples/images/study.py accuracy           # 10 trainings, one after the other, a core each
    python examples/images/study.py accuracy --batches 4096
    python examples/images/study.py time               # on an idle machine: 1, 2 and 4 ranks to an accuracy
    python examples/images/study.py figures            # draws all pictures from study.json, and prints the tables

Each of the 10 trainings took about a minute of a core, and two pieces may run at the same time. --json names another
file; the pictures are written to its directory.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "docs" / "pictures" / "images" / "study.json"
BATCHES = (64, 4096, 1024, 256)
# Ways in which the rate follows the batch, as options of train.py.
ARMS = {
    "same rate": ["--scaling", "none", "--warmup-epochs", "0"],
    "linear scaling": ["--warmup-epochs", "0"],
    "linear scaling and warm-up": [],
}
RANKS, ROWS, GOAL = "1,2,4", 64, 0.7


def update(file: Path, kind: str, found: Any, name: str | None = None) -> None:
    """Adds a result to `file`, also while another piece runs. name: its name among several results of a kind."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as content:
        fcntl.flock(content, fcntl.LOCK_EX)
        content.seek(0)
        text = content.read()
        results = json.loads(text) if text else {}
        if name is None:
            results[kind] = found
        else:
            results.setdefault(kind, {})[name] = found
        content.truncate(0)
        content.write(json.dumps(results, indent=1) + "\n")


def done(file: Path) -> dict[str, Any]:
    """Returns the results in `file`."""
    return json.loads(file.read_text()) if file.exists() else {}


def accuracy(file: Path, batches: Sequence[int], options: Sequence[str]) -> None:
    """Runs trainings that have no results yet. options: further options of train.py."""
    # On one core each, which does not change the accuracy, so that two pieces can run at the same time.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    import train

    for batch in batches:
        arms = ARMS if batch != train.BASE_BATCH else {"same rate": ARMS["same rate"]}
        for arm, words in arms.items():
            name = f"{batch}, {arm}"
            if name in done(file).get("accuracy", {}):
                continue
            begin = time.process_time()
            history = train.train(train.parser().parse_args([f"--batch-size={batch}", *words, *options]), verbose=0)
            found = {"batch": batch, "arm": arm, "core_seconds": time.process_time() - begin}
            found |= {"val_accuracy": history["val_accuracy"], "loss": history["loss"]}
            update(file, "accuracy", found, name)
            print(f"{name}: {found['val_accuracy'][-1]:.3f} in {found['core_seconds']:.0f} s", flush=True)


def times(file: Path, options: Sequence[str]) -> None:
    """Measures steps and the time to an accuracy with `keras-ddl bench train`. options: its further options."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        command = [sys.executable, "-m", "keras_ddl.cli", "bench", "train", "train:subject", "--ranks", RANKS]
        command += ["--batch", str(ROWS), "--to-accuracy", str(GOAL), "--json", str(found), *options]
        subprocess.run(command, cwd=HERE, check=True)
        result = json.loads(found.read_text())
    update(file, "time", result)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=["accuracy", "time", "figures"])
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of results (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="for accuracy")
    options, others = parser.parse_known_args(arguments)
    if options.piece == "accuracy":
        accuracy(options.json, options.batches, others)
    elif options.piece == "time":
        times(options.json, others)
    else:
        import figures

        figures.draw(done(options.json), options.json.parent)
        print(figures.tables(done(options.json)))


if __name__ == "__main__":
    main()
