"""A model that this process cannot run alone, because each rank has parts of its weights: all ranks run it together.

Its base graph is traced and written as ever, without the weights, which no base graph keeps. What needs them, the
outputs for the sample, the ranks compute together from the live model (export/checkpoints/answers_of_ranks.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Elsewhere:
    """What is known of a model that runs elsewhere.

    Attributes:
        rows: a sample; None: the model has failed on it.
        random: outputs that differ between two runs.
        spread: the variables that have no value in this process.
    """

    rows: Mapping[str, Any] | None
    random: Collection[str]
    spread: Collection[Any]
