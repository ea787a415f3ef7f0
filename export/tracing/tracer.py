"""Builds a base graph from a model in steps: trace, save, scan, drop the weights, choose the sample."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keras_ddl import model_state
from keras_ddl.checkpoint import tensor_bundle as bundle
from keras_ddl.errors import ExportError
from keras_ddl.export import manifest, signatures
from keras_ddl.export.inference.inputs import Inputs
from keras_ddl.export.inference.isolation import layers_of, portable_layers, unchanged
from keras_ddl.export.inference.replay import DEFAULT, compare, save, source, storable
from keras_ddl.export.proof.scan import ScanReport, scan_saved_model
from keras_ddl.export.signatures import declarations, functions
from keras_ddl.export.sources.object_graphs import places_in_objects
from keras_ddl.export.sources.weight_files import places_in_h5
from keras_ddl.files import digests

UNTRACKED = "untracked"
_NO_SAMPLE = "the model fails on generated rows ({}), so an export cannot compare outputs; give sample="


@dataclass(frozen=True)
class Elsewhere:
    """Describes a model that this process cannot run alone, because each rank has parts of its weights.

    Its base graph is traced and written as usual, because a base graph has no weights. The ranks together compute the
    outputs for the sample, which need weights, from the live model (export/checkpoints/answers_of_ranks.py).

    Attributes:
        rows: a sample; None: the model failed on it.
        random: outputs that differ between two runs.
        spread: variables without a value in this process.
    """

    rows: Mapping[str, Any] | None
    random: Collection[str]
    spread: Collection[Any]


@dataclass(frozen=True)
class Traced:
    """The result of a trace.

    Attributes:
        record: entries of the manifest.
        functions: the traced functions.
        rows: the sample, if the model accepts one.
        variables: all variables that the functions read.
        untracked: the variables among them that Keras does not track, by checkpoint key.
    """

    record: dict[str, Any]
    functions: signatures.Trace
    rows: Mapping[str, Any] | None
    variables: list[Any]
    untracked: Mapping[str, Any]


class Tracer:
    """One trace of a model, which has a name if it is a part of `whole`. Run it in `isolated`."""

    def __init__(
        self,
        model: Any,
        inputs: Inputs,
        staged: Path,
        allowed: list[str],
        name: str | None,
        whole: Any,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.model, self.inputs, self.staged, self.allowed = model, inputs, staged, allowed
        self.name, self.whole, self.elsewhere = name, whole, elsewhere

    def run(
        self,
        classify: Any,
        regress: Any,
        float32_outputs: bool,
        portable: bool,
        rows: Mapping[str, Any] | None,
        declared: declarations.Declared,
    ) -> Traced:
        """Fills the staging directory, except manifest.json. Raises: ExportError: the model cannot be served."""
        import keras
        import tensorflow as tf

        warnings: list[str] = []
        with portable_layers(self.model) if portable else contextlib.nullcontext():
            try:
                trace = signatures.trace(self.model, self.inputs, classify, regress, float32_outputs, declared)
            except ExportError:
                raise
            except Exception as error:
                plain = re.sub(r"\x1b\[\d*m", "", str(error))  # Keras prints in bold
                raise ExportError(
                    f"Training writes a graph of {type(self.model).__name__} {self.model.name!r} called with "
                    f"training=False. Received: tracing it failed with {type(error).__name__}: {plain}. Fix call(), "
                    f"or train with callbacks.Checkpoint(export_base=False)."
                ) from error
        traced = trace.functions
        read = {id(variable) for function in traced.values() for variable in function.variables}
        variables = model_state.weights_of(self.whole)
        own = self._own(variables)
        captured = {key: _tf_variable(each) for key, each in variables.items() if id(_tf_variable(each)) in read}
        known = {id(variable) for variable in captured.values()}
        strays = {id(v): v for function in traced.values() for v in function.variables if id(v) not in known}
        marks = [str(i) if self.name is None else f"{self.name}-{i}" for i in range(len(strays))]
        untracked = {bundle.variable_key(UNTRACKED, mark): each for mark, each in zip(marks, strays.values())}
        if untracked:
            names = [variable.name for variable in untracked.values()]
            warnings.append(f"checkpoints of this run also keep variables that Keras does not track: {names}")
        self._save(traced, captured, dict(zip(marks, strays.values())), functions.modules(declared.functions.values()))
        served = self._declare(trace, declared, float32_outputs)
        report = self._scan()
        static = self._drop_weights([*captured, *untracked])
        read_by_any = list({id(v): v for function in traced.values() for v in function.variables}.values())
        rows, origin = self._choose_sample(trace, read_by_any, rows, own_rows(trace, declared), warnings)
        dtypes = {getattr(layer, "compute_dtype", None) for layer in layers_of(self.model)}
        record: dict[str, Any] = {
            "name": self.name,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            **served,
            "variables": model_state.table(variables),
            "own": list(own),
            "trainable": self._trainable(own),
            "captured": list(captured),
            "untracked": model_state.table(untracked),
            "constants": {
                key: digests.digest_bytes(model_state.tensor_of(each).numpy().tobytes())
                for key, each in own.items()
                if key not in captured and not each.trainable and not model_state.is_seed(each)
                if self.elsewhere is None or all(each is not spread for spread in self.elsewhere.spread)
            },
            "h5": places_in_h5(self.model, own),
            "h5_of_whole": {} if self.whole is self.model else places_in_h5(self.whole, own),
            "objects": places_in_objects(self.model, own),
            "static": static,
            "ops": report.ops,
            "allow_ops": self.allowed,
            "warnings": [*report.warnings, *warnings],
            "sample": origin,
            "random": self._random_outputs(trace.answer, read_by_any, rows),
            "half": "float16" in dtypes or "bfloat16" in dtypes,
        }
        return Traced(record, trace, rows, read_by_any, untracked)

    def _own(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the complete model's variables that belong to the traced model."""
        known = {id(each): key for key, each in variables.items()}
        foreign = [each.path for each in self.model.variables if id(each) not in known]
        if foreign:
            raise ExportError(
                "All variables of a part must belong to the model, because checkpoints hold only the variables of the "
                f"model. Received: {self.name!r} with {foreign[:3]}, which {type(self.whole).__name__} "
                f"{self.whole.name!r} lacks. Make the part an attribute of the model in training."
            )
        return {known[id(each)]: each for each in self.model.variables}

    def _trainable(self, own: Mapping[str, Any]) -> list[str]:
        keys = {id(variable): key for key, variable in own.items()}
        return [keys[id(variable)] for variable in self.model.trainable_variables]

    def _save(
        self,
        traced: Mapping[str, Any],
        captured: Mapping[str, Any],
        untracked: Mapping[str, Any],
        modules: list[Any],
    ) -> None:
        """Writes the traced functions as a SavedModel, whose variables have the names of `bundle.variable_key`."""
        import tensorflow as tf

        module = tf.Module()
        # Attribute and dict key form the checkpoint key that bundle.variable_key returns: `weights/<escaped name>`.
        setattr(module, model_state.WEIGHTS, {bundle.name_of(key): each for key, each in captured.items()})
        setattr(module, UNTRACKED, dict(untracked))
        module.resources = _resources([*layers_of(self.model), *modules], traced)
        try:
            tf.saved_model.save(module, str(self.staged), signatures=dict(traced))
        except (AssertionError, ValueError, NotImplementedError) as error:
            raise ExportError(
                f"A servable graph must fit into a SavedModel. Received: {type(error).__name__}: {error}. Make tables "
                "and other resources attributes of a layer of the model or, if a signature's function is a method of "
                "a tf.Module, of that module."
            ) from error
        for name in set(traced) & set(signatures.METHODS):
            _set_method(self.staged / "saved_model.pb", name, signatures.METHODS[name])

    def _declare(self, trace: signatures.Trace, declared: declarations.Declared, float32: bool) -> dict[str, Any]:
        """Adds declared signatures to the SavedModel; returns the manifest's entries about signatures."""
        answers = trace.functions[DEFAULT].structured_outputs
        by_functions = {
            name: {each: source(name, each) for each in sorted(trace.functions[name].structured_outputs)}
            for name in declared.functions
        }
        record: dict[str, Any] = {
            "inputs": {name: [spec.dtype.name, spec.shape.as_list()] for name, spec in self.inputs.specs.items()},
            "composites": {name: spec.shape.as_list() for name, spec in self.inputs.composites.items()},
            "outputs": {name: signatures.describe(answers[name]) for name in trace.outputs},
            "answers": {name: signatures.describe(answers[name]) for name in sorted(answers)},
            "layers": {name: described for name, described in trace.layers.items() if name not in answers},
            "float32": float32,
            "signatures": sorted(trace.functions),
            "declared": {DEFAULT: {name: name for name in trace.outputs}, **by_functions},
            "images": {},
            "own_inputs": {
                name: {each: [spec.dtype.name, spec.shape.as_list()] for each, spec in inputs.specs.items()}
                for name, inputs in trace.own.items()
            },
        }
        if set(answers) != set(trace.outputs):  # serving_default returns layers only if so declared
            outputs = {DEFAULT: record["declared"][DEFAULT], **declared.outputs}
            declared = dataclasses.replace(declared, outputs=outputs)
        return {**record, **(declarations.add_to(self.staged, declared, record) if declared else {})}

    def _scan(self) -> ScanReport:
        report = scan_saved_model(self.staged, self.allowed)
        report.raise_for_problems(f"{type(self.model).__name__} {self.model.name!r}")
        return report

    def _drop_weights(self, weights: list[str]) -> list[str]:
        """Rewrites variables/ without the weights, which every export adds; returns the remaining keys."""
        folder = self.staged / "variables"
        entries = bundle.entries(str(folder / "variables"))
        missing = [key for key in weights if key not in entries]
        if missing:
            raise ExportError(
                f"Every weight must be saved under its own key. Received: no key for {missing}; please report it."
            )
        rest = {key: dtype for key, (dtype, _) in entries.items() if key not in set(weights)}
        tensors = bundle.read(str(folder / "variables"), rest)
        shutil.rmtree(folder)
        folder.mkdir()
        bundle.write(str(self.staged / manifest.STATIC), tensors)
        return list(rest)

    def _choose_sample(
        self,
        trace: signatures.Trace,
        variables: list[Any],
        rows: Mapping[str, Any] | None,
        own_rows: Mapping[str, Any],
        warnings: list[str],
    ) -> tuple[Mapping[str, Any] | None, str | None]:
        """Chooses the rows with which an export is proved, and saves them.

        Returns: the rows and their origin; (None, None) with a warning if the model cannot run on made-up rows.
        Raises: ExportError: a signature's function, or the model with given rows, fails.
        """
        origin = "given" if rows is not None else "made up"
        if self.elsewhere is not None:
            if self.elsewhere.rows is None:
                warnings.append(_NO_SAMPLE.format("when all ranks ran it"))
                return None, None
            save(self.staged / manifest.SAMPLE, {name: storable(array) for name, array in self.elsewhere.rows.items()})
            return self.elsewhere.rows, origin
        rows = {**(rows if rows is not None else self.inputs.made_up_sample()), **own_rows}
        for name in trace.own:
            try:
                answer(trace.functions[name], trace.of(name, rows), variables)
            except Exception as error:
                raise ExportError(
                    f"A signature's function must run on its sample. Received: the function of {name!r} failed "
                    f"with {type(error).__name__}: {error}."
                ) from error
        try:
            answer(trace.answer, rows, variables)
        except Exception as error:
            if origin == "given":
                raise ExportError(
                    f"The model must run on sample=. Received: {type(error).__name__}: {error}. Give rows as in fit."
                ) from error
            warnings.append(_NO_SAMPLE.format(type(error).__name__))
            return None, None
        save(self.staged / manifest.SAMPLE, {name: storable(array) for name, array in rows.items()})
        return rows, origin

    def _random_outputs(
        self, function: Callable[..., Any], variables: list[Any], rows: Mapping[str, Any] | None
    ) -> list[str]:
        if rows is None:
            return []
        if self.elsewhere is not None:
            return list(self.elsewhere.random)
        first, second = (answer(function, rows, variables) for _ in range(2))
        return differing(first, second)


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Returns the names of outputs that differ between two runs."""
    return [name for name in first if compare({name: first[name]}, {name: second[name]}, 0.0)["problems"]]


def answer(function: Callable[..., Any], rows: Mapping[str, Any], variables: Iterable[Any]) -> dict[str, Any]:
    """Calls a function on the sample, and restores variables that the call changes."""
    import tensorflow as tf

    # Only non-trainable variables can change at inference, and they are small (statistics, seeds, counters).
    with unchanged(variable for variable in variables if not variable.trainable):
        outputs = function(**{name: tf.constant(array) for name, array in rows.items()})
        return {name: storable(tensor.numpy()) for name, tensor in outputs.items()}


def own_rows(trace: signatures.Trace, declared: declarations.Declared) -> dict[str, Any]:
    """Returns the samples of signatures with their own inputs, under the keys that `replay.rows_of` expects."""
    return {
        source(name, each): array
        for name, inputs in trace.own.items()
        for each, array in inputs.flatten(cast(functions.Function, declared.functions[name]).sample).items()
    }


def _resources(objects: Iterable[Any], traced: Mapping[str, Any]) -> list[Any]:
    """Returns lookup tables and similar resources that the functions use.

    `objects` are all layers, because TensorFlow's own walk of a Keras model does not enter layers in Python lists.
    """
    import tensorflow as tf

    used = {id(tensor) for function in traced.values() for tensor in function.captured_inputs}
    resources: dict[int, Any] = {}
    for owner in objects:
        for each in tf.train.TrackableView(owner).descendants():
            if isinstance(each, tf.saved_model.experimental.TrackableResource) and id(each.resource_handle) in used:
                resources[id(each)] = each
    return list(resources.values())


def _set_method(file: Path, signature: str, method: str) -> None:
    """Sets the method name that TensorFlow Serving's Classify and Regress require; saved_model.save writes predict."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    for graph in saved.meta_graphs:
        graph.signature_def[signature].method_name = method
    file.write_bytes(saved.SerializeToString(deterministic=True))


def _tf_variable(variable: Any) -> Any:
    from keras_ddl.compat.strategies import primary_variable

    return primary_variable(variable.value)
