"""Writes checkpoints until it is killed. Arguments: directory, first step. Does not import TensorFlow."""

from __future__ import annotations

import sys
from pathlib import Path

from keras_ddl import checkpoint


def content(step: int) -> bytes:
    return bytes((step + i) % 251 for i in range(20_000 + 97 * step))


if __name__ == "__main__":
    root, step = Path(sys.argv[1]), int(sys.argv[2])

    def fill(folder: Path) -> None:
        (folder / "weights.index").write_bytes(content(step)[:500])
        (folder / "weights.data-00000-of-00001").write_bytes(content(step))

    while True:
        checkpoint.write(root, step, fill, epoch=step, metrics={"loss": 1 / step}, monitor="loss")
        if step % 3 == 0:
            checkpoint.write(root, step, fill, epoch=step, metrics={"loss": 1 / step}, monitor="loss")
        checkpoint.prune(root, keep=2, keep_best=("loss", "min"))
        print(step, flush=True)
        step += 1
