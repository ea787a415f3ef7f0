"""The base graph: the model's inference function as a plain SavedModel, written once when training begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class BaseGraph:
    """A base graph on disk and its function in this process. Pass it to `save_checkpoint(base=...)`.

    Attributes: path (ckpt_dir/base), manifest (dict), warnings (list of sentences).
    """


def write_base_graph(
    model: Any,
    ckpt_dir: str | Path,
    *,
    sample: Any = None,
    input_signature: Mapping[str, Any] | None = None,
    classify: Any = None,
    regress: Any = None,
    float32_outputs: bool = True,
    portable: bool = True,
) -> BaseGraph:
    """Traces `model(inputs, training=False)` and writes it to `ckpt_dir/base/`. Rank 0 only; no collective.

    Called in on_train_begin (see `inputs_are_known`); refuses there a model that could not be served. A base graph of
    the same model that is there already is kept; one of another model with checkpoints beside it is an ExportError
    (`checkpoint.set_aside` moves them out of the way).

    Args:
        sample: a few rows of real input, in the structure that the model takes; stored, and replayed by every export
            to compare outputs. Default: made-up rows.
        input_signature: input name -> tf.TensorSpec, in place of what the model says.
        classify, regress: `Classify(...)`, `Regress(...)`: further signatures that take serialized tf.Example.
        float32_outputs: cast float16 and bfloat16 outputs to float32, which REST clients need.
        portable: trace LSTM and GRU without cuDNN, so that the graph runs on a CPU.
    Raises: ExportError: the model cannot be served; the message names each node or layer.
    """
    raise NotImplementedError
