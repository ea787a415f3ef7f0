"""The base graph: the model's inference function as a plain SavedModel, written once when training begins.

ckpt/base/saved_model.pb, assets/, fingerprint.pb    as an export will copy them, byte for byte
ckpt/base/variables/static.*                         what is in its variables/ and is not a weight
ckpt/base/sample.npz, manifest.json                  rows to replay; see manifest.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from keras_ddl import checkpoint as ckpt
from keras_ddl import model_state
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.errors import CheckpointError, ExportError
from keras_ddl.export import manifest
from keras_ddl.export.proof import validate
from keras_ddl.export.proof.replay import ANSWERS, ROWS, THREADS, compare, kernel_threads, storable
from keras_ddl.export.signatures import METHODS, Classify, Regress, declarations
from keras_ddl.export.tracing.inputs import find_inputs
from keras_ddl.export.tracing.isolation import isolated
from keras_ddl.export.tracing.tracer import Traced, Tracer, answer
from keras_ddl.files import durable

_WHAT = "A base graph"


class BaseGraph:
    """A base graph on disk and its function in this process. Pass it to `save_checkpoint(base=...)`.

    Attributes: path (ckpt_dir/base), name (of the part of a model), record (manifest), warnings (sentences).
    """

    def __init__(self, path: Path, traced: Traced) -> None:
        self.path = path
        self.name: str | None = traced.record["name"]
        self.record = traced.record
        self.warnings: tuple[str, ...] = tuple(traced.record["warnings"])
        self._traced = traced

    def extra_variables(self) -> Mapping[str, Any]:
        """Variables that the graph reads and Keras does not track, by checkpoint key."""
        return self._traced.untracked

    def golden(self) -> dict[str, Any]:
        """Returns what the graph answers to the sample with the current weights: name -> array.

        Names are those of outputs, of layers that a signature was declared with, and "signature/output" of functions.
        """
        rows = self._traced.rows
        assert rows is not None  # `evidence` is empty without a sample
        return isolated(lambda: answer(self._traced.functions.answer, rows, self._traced.variables))

    def evidence(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns (rows and golden outputs, whether the live model answers alike), for a checkpoint being saved.

        They differ when something that the graph holds as a constant was changed after it was traced: an attribute of
        a layer, or statistics of a preprocessing layer that was adapted too late.
        """
        rows = self._traced.rows
        if rows is None:
            return {}, {"agrees": None}
        skip = set(self.record["random"])
        golden = self.golden()
        arrays = {ROWS + name: storable(array) for name, array in rows.items()}
        arrays |= {ANSWERS + name: array for name, array in golden.items()}
        arrays[THREADS] = kernel_threads()
        try:
            live = isolated(lambda: answer(self._traced.functions.live, rows, self._traced.variables))
        except Exception as error:  # a model that runs only inside a tf.function must not lose its checkpoints for it
            return arrays, {"agrees": None, "problems": [f"the live model did not answer: {type(error).__name__}"]}
        found = compare(_without(golden, skip), _without(live, skip), 10 * _tolerance(self.record))
        return arrays, {"agrees": not found["problems"], "difference": found["largest"], "problems": found["problems"]}


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
) -> BaseGraph:
    """Traces `model(inputs, training=False)` and writes it to `ckpt_dir/base/`. Rank 0 only; no collective.

    Called in on_train_begin (see `inputs_are_known`); refuses there a model that could not be served. A base graph of
    the same model that is there already is replaced; one of another model with checkpoints beside it is an ExportError
    (`checkpoint.set_aside` moves them out of the way).

    Args:
        name: a name, if several models are to be exported from this directory: the graph then goes to
            `ckpt_dir/base-<name>/`, and an export is told `model=name`.
        whole: the model whose checkpoints are saved, if `model` is a part of it; needs a name.
        sample: a few rows of real input, in the structure that the model takes; stored, and replayed by every export
            to compare outputs. Default: made-up rows.
        input_signature: tf.TensorSpec in the structure that the model takes, in place of what the model says.
        classify, regress: `Classify(...)`, `Regress(...)`: further signatures that take serialized tf.Example.
        signatures: further signatures, by name: the name of an output or of a layer, a list of such, a mapping from the
            names that clients see, `EncodedImages(...)`, a function of the model's inputs, which may be a layer or a
            model, too, or `Function(...)`. `serving_default` is given other outputs in the same way.
        float32_outputs: cast float16 and bfloat16 outputs to float32, which REST clients need.
        portable: trace LSTM and GRU without cuDNN, so that the graph runs on a CPU.
        allow_ops: custom ops that your server is known to have.
    Raises: ExportError: the model cannot be served; the message names each node, layer or input.
    Cost: one trace and one write of the weights, which are then dropped from it; seconds for a large model.
    """
    if (name is None and whole is not None) or (name is not None and not manifest.is_name(name)):
        raise ExportError(
            "A part of a model has a name of letters, digits, '_' and '-', by which an export finds its graph. "
            f"Received: name={name!r}. Give name='generator', for example."
        )
    from keras_ddl.compat.models import has_call  # imports Keras

    root = durable.make_directory(Path(ckpt_dir), _WHAT, ExportError)
    path = root / ckpt.base_directory(name)
    if not has_call(model):
        raise ExportError(
            f"A base graph is traced from a model that can be called. Received: {type(model).__name__} "
            f"{model.name!r}, which has no call(). Write one for each part of it that is to be served: "
            "write_base_graph(model.generator, ..., name='generator', whole=model)."
        )
    if not getattr(model, "built", True) and input_signature is None and sample is None:
        raise ExportError(
            f"A base graph is traced from a built model. Received: {type(model).__name__} {model.name!r}, not built "
            f"yet. Give it an Input, call it on a batch, or give sample= or input_signature=."
        )
    declared = declarations.read(signatures, functions=True, taken=METHODS)
    inputs = find_inputs(model, input_signature, sample)
    rows = None if sample is None else inputs.flatten(sample)
    with bundle.translated(_WHAT, path, ExportError), durable.staging_directory(root) as staged:
        tracer = Tracer(model, inputs, staged, sorted(set(allow_ops)), name, model if whole is None else whole)
        traced = isolated(lambda: tracer.run(classify, regress, float32_outputs, portable, rows, declared))
        _refuse_other_checkpoints(root, traced.record)
        manifest.write(staged, traced.record)
        durable.publish(staged, path, replace=True)
    return BaseGraph(path, traced)


def _refuse_other_checkpoints(root: Path, record: Mapping[str, Any]) -> None:
    whole = [each for each in ckpt.list_checkpoints(root) if each.problem is None]
    if not whole:
        return
    try:
        model_state.match(record["variables"], (whole[-1].state or {})["weights"], "weight", whole[-1].path)
    except CheckpointError as error:
        raise ExportError(
            f"A checkpoint directory must hold only one model. Received: {root}, with {len(whole)} checkpoints of "
            f"another: {error} Give another directory, or move them aside with checkpoint.set_aside({str(root)!r})."
        ) from error


def _tolerance(record: Mapping[str, Any]) -> float:
    return validate.HALF_TOLERANCE if record["half"] else validate.TOLERANCE


def _without(outputs: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: array for name, array in outputs.items() if name not in names}
