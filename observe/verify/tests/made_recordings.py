"""Made-up recordings of training."""

from __future__ import annotations

import numpy as np

from keras_ddl.verify.recording import Event

EPSILON = 2.0**-52


Arrays = dict[str, np.ndarray]


KINDS = {"returned accuracy": "counts", "log f1": "logs"}


class Made:
    """A recording in memory: `steps` are the arrays after each training step."""

    def __init__(self, steps: list[Arrays], labels: list[str] | None = None) -> None:
        self.events, self._arrays = [], steps
        for number, arrays in enumerate(steps):
            kinds = {name: "weights" if name.startswith("w") else KINDS.get(name, name) for name in arrays}
            scales = {name: float(np.max(np.abs(each), initial=0.0)) for name, each in arrays.items()}
            of = "model" if labels is None else labels[number]
            self.events.append(Event(number, "step", of, number + 1, kinds, scales, dict.fromkeys(arrays, 1)))

    def arrays(self, event: Event) -> Arrays:
        return self._arrays[event.number]


def training(count: int = 4, change: float = 0.0, at: int = 0, name: str = "w1") -> list[Arrays]:
    """Returns the weights after each of some steps; from step `at` on, entry 2 of one weight is changed by `change`."""
    draw = np.random.default_rng(0)
    steps = []
    for number in range(count):
        arrays = {"w1": draw.normal(size=(5, 3)), "w2": draw.normal(size=7), "iterations": np.int64(number)}
        if number >= at:
            arrays[name] = arrays[name].copy()
            arrays[name].reshape(-1)[2] += change
        steps.append(arrays)
    return steps
