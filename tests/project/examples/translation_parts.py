"""Imports for tests of examples/translation, and ranks that are threads."""

from __future__ import annotations

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from harness.examples import EXAMPLES

# Removed again below, because the folder also holds examples/horovod, which `import horovod` would find.
sys.path.insert(0, str(EXAMPLES))
from translation import (
    corpus,
    evaluation,
    history,
    lines,
    phrases,
    run_directory,
    scores,
    serving,
    settings,
    subwords,
    training,
    words,
)
from translation.batches import Batches
from translation.beam import beam_search
from translation.inference import Translator, translated
from translation.lines import Ranks
from translation.losses import TokenCrossentropy
from translation.lstm import LSTMTranslator
from translation.plan import Plan
from translation.studies import (
    divergence,
    diverging,
    original,
    rows,
    scaling,
    strong_scaling,
    table_bytes,
    training_jobs,
)
from translation.text import GraphSubwords
from translation.transformer import Transformer

sys.path.remove(str(EXAMPLES))

__all__ = [
    "Batches",
    "GraphSubwords",
    "LSTMTranslator",
    "Plan",
    "Ranks",
    "TokenCrossentropy",
    "Transformer",
    "Translator",
    "beam_search",
    "corpus",
    "divergence",
    "diverging",
    "evaluation",
    "history",
    "lines",
    "on_ranks",
    "original",
    "phrases",
    "rows",
    "run_directory",
    "scaling",
    "scores",
    "serving",
    "settings",
    "strong_scaling",
    "subwords",
    "table_bytes",
    "training",
    "training_jobs",
    "translated",
    "words",
]


def on_ranks(size, function):
    """Returns `function(Ranks)` for each of `size` ranks, which are threads here."""
    barrier, given = threading.Barrier(size, timeout=300), [None] * size

    def on_rank(rank):
        def all_gather(mine):
            given[rank] = pickle.dumps(mine)
            barrier.wait()
            everyone = [pickle.loads(one) for one in given]
            barrier.wait()
            return everyone

        try:
            return function(Ranks(rank, size, all_gather))
        except threading.BrokenBarrierError:
            raise
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise

    errors: list[BaseException] = []
    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(on_rank, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [one.result() for one in results]
