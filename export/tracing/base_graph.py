"""Writes the base graph: the model's inference function as a plain SavedModel. It is written when training begins.

ckpt/base/saved_model.pb, assets/, fingerprint.pb    copied by an export, byte for byte
ckpt/base/variables/static.*                         contents of variables/ that are not weights
ckpt/base/sample.npz, manifest.json                  rows to replay; see manifest.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl import model_state
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.checkpoint.listing import base_directory
from keras_ddl.errors import CheckpointError, ExportError
from keras_ddl.export import manifest
from keras_ddl.export.inference.inputs import find_inputs
from keras_ddl.export.inference.isolation import isolated
from keras_ddl.export.inference.replay import ANSWERS, ROWS, THREADS, compare, kernel_threads, storable
from keras_ddl.export.proof import validate
from keras_ddl.export.signatures import METHODS, Classify, Regress, declarations
from keras_ddl.export.tracing.tracer import Elsewhere, Traced, Tracer, answer
from keras_ddl.files import durable

_WHAT = "A base graph"


class BaseGraph:
    """A base graph on disk and its function in this process. Pass it to `save_checkpoint(base=...)`.

    Attributes:
        path: ckpt_dir/base.
        name: name of the part, if this is a part of a model.
        record: the manifest.
        warnings: what the user should know, each a sentence.
        runs_elsewhere: whether this process lacks weights of the model, so that it cannot compute outputs.
        answers: the model's outputs for the sample with the current weights, if it runs elsewhere and they are known.
    """

    def __init__(self, path: Path, traced: Traced) -> None:
        self.path, self.runs_elsewhere = path, False
        self.answers: Mapping[str, Any] | None = None
        self.name: str | None = traced.record["name"]
        self.record = traced.record
        self.warnings: tuple[str, ...] = tuple(traced.record["warnings"])
        self._traced = traced

    def extra_variables(self) -> Mapping[str, Any]:
        """The variables that the graph reads and Keras does not track, by checkpoint key."""
        return self._traced.untracked

    def golden(self) -> dict[str, Any]:
        """Returns the graph's outputs for the sample with the current weights: name -> array.

        Names are outputs, layers that a signature names, and "signature/output" of functions.
        """
        rows = self._traced.rows
        assert rows is not None  # `evidence` is empty without a sample
        return isolated(lambda: answer(self._traced.functions.answer, rows, self._traced.variables))

    def evidence(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns what a checkpoint stores so that an export can prove itself.

        The first mapping has the sample's rows and the graph's outputs for them, the golden outputs. The second says
        whether the live model has the same outputs. They differ when a constant of the graph was changed after tracing:
        an attribute of a layer, or statistics of a preprocessing layer that was adapted too late.
        """
        rows = self._traced.rows
        if rows is None or (self.runs_elsewhere and self.answers is None):
            return {}, {"agrees": None}
        skip = set(self.record["random"])
        golden = self.answers if self.runs_elsewhere and self.answers is not None else self.golden()
        arrays = {ROWS + name: storable(array) for name, array in rows.items()}
        arrays |= {ANSWERS + name: array for name, array in golden.items()}
        arrays[THREADS] = kernel_threads()
        if self.runs_elsewhere:  # the live model's outputs, which the export compares with the graph's
            return arrays, {"agrees": None}
        try:
            live = isolated(lambda: answer(self._traced.functions.live, rows, self._traced.variables))
        except Exception as error:  # even a model that runs only inside a tf.function must get its checkpoints
            return arrays, {"agrees": None, "problems": [f"the live model did not answer: {type(error).__name__}"]}
        tolerance = validate.HALF_TOLERANCE if self.record["half"] else validate.TOLERANCE
        comparison = compare(_without(golden, skip), _without(live, skip), 10 * tolerance)
        problems = comparison["problems"]
        return arrays, {"agrees": not problems, "difference": comparison["largest"], "problems": problems}


def write_base_graph(
    model: Any,
    ckpt_dir: str | Path,
    *,
    name: str | None = None,
    whole: Any = None,
    sample: Any = None,
    input_signature: Any = None,
    classify: Classify | None = None,
    regress: Regress | None = None,
    signatures: Mapping[str, Any] | None = None,
    float32_outputs: bool = True,
    portable: bool = True,
    allow_ops: Iterable[str] = (),
    elsewhere: Elsewhere | None = None,
) -> BaseGraph:
    """Traces `model(inputs, training=False)` and writes it to `ckpt_dir/base/`. Rank 0 only; no collective.

    Call it in on_train_begin (see `inputs_are_known`): a model that cannot be served is then refused before training.
    It replaces an existing base graph of the same model. If the directory has checkpoints of another model, it raises
    an ExportError (`checkpoint.set_aside` moves them out of the way).

    Args:
        name: required if several models are exported from this directory. The graph goes to `ckpt_dir/base-<name>/`,
            and `model=name` selects it for an export.
        whole: the complete model whose checkpoints are saved, if `model` is a part of it; needs a name.
        sample: a few rows of real input, in the structure that the model takes. They are stored, and every export
            compares outputs on them. Default: made-up rows.
        input_signature: tf.TensorSpec in the structure that the model takes; default: the model's own.
        classify, regress: `Classify(...)`, `Regress(...)`: further signatures that take serialized tf.Example.
        signatures: further signatures. Name -> an output or layer, a list of them, a mapping from public names to them,
            `EncodedImages(...)`, a function of the model's inputs (also a layer or model), or `Function(...)`. The name
            `serving_default` changes what that signature returns.
        float32_outputs: cast float16 and bfloat16 outputs to float32, which REST clients need.
        portable: trace LSTM and GRU without cuDNN, so that the graph runs on a CPU.
        allow_ops: custom ops that your server is known to have.
        elsewhere: describes a model whose weights this process does not have.
    Raises: ExportError: the model cannot be served; the message names each node, layer or input.
    Cost: one trace and one write of the weights, which are then removed; seconds for a large model.
    """
    if (name is None and whole is not None) or (name is not None and not manifest.is_name(name)):
        raise ExportError(
            "A part of a model needs a name of letters, digits, '_' and '-', because an export selects the graph by "
            f"this name. Received: name={name!r}. Give name='generator', for example."
        )
    from keras_ddl.compat.models import has_call  # imports Keras

    root = durable.make_directory(Path(ckpt_dir), _WHAT, ExportError)
    path = root / base_directory(name)
    if not has_call(model):
        raise ExportError(
            f"A base graph needs a model that can be called. Received: {type(model).__name__} {model.name!r}, "
            "which has no call(). Write a base graph for each part to be served: write_base_graph(model.generator, "
            "..., name='generator', whole=model)."
        )
    if not getattr(model, "built", True) and input_signature is None and sample is None:
        raise ExportError(
            f"A base graph needs a built model. Received: {type(model).__name__} {model.name!r}, not built "
            "yet. Give the model an Input, call it on a batch, or pass sample= or input_signature=."
        )
    declared = declarations.read(signatures, functions=True, taken=METHODS)
    inputs = find_inputs(model, input_signature, sample)
    rows = None if sample is None else inputs.flatten(sample)
    with bundle.translated(_WHAT, path, ExportError), durable.staging_directory(root) as staged:
        tracer = Tracer(
            model, inputs, staged, sorted(set(allow_ops)), name, model if whole is None else whole, elsewhere
        )
        traced = isolated(lambda: tracer.run(classify, regress, float32_outputs, portable, rows, declared))
        _refuse_other_checkpoints(root, traced.record)
        manifest.write(staged, traced.record)
        durable.publish(staged, path, replace=True)
    return BaseGraph(path, traced)


def _refuse_other_checkpoints(root: Path, record: Mapping[str, Any]) -> None:
    intact = [checkpoint for checkpoint in ckpt.list_checkpoints(root) if checkpoint.problem is None]
    if not intact:
        return
    try:
        model_state.match(record["variables"], (intact[-1].state or {})["weights"], "weight", intact[-1].path)
    except CheckpointError as error:
        raise ExportError(
            f"A checkpoint directory must hold only one model. Received: {root}, with {len(intact)} checkpoints of "
            f"another: {error} Give another directory, or move them aside with checkpoint.set_aside({str(root)!r})."
        ) from error


def _without(outputs: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: array for name, array in outputs.items() if name not in names}
