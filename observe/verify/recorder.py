"""Records the training of a verified program in one process, as the observer of its Strategy (strategy/observing.py).

It only reads variables, between steps, but changes the last bit of weights if the plan asks for it. It runs on
every rank, because shards must be gathered to be read. Rank 0 stores values, the others digests.
"""

from __future__ import annotations

import gc
import inspect
import os
import platform
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_ddl import callbacks, communicator, config, cut
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import Strategy, accumulation, observing, one_per_job
from keras_ddl.strategy.base import strategy_of_ranks
from keras_ddl.strategy.saving import writers
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.verify.compare import COUNTS
from keras_ddl.verify.recording import STARTED_FILE, Event, Plan, Writer

# Callbacks that resume an earlier run or write on all ranks. They are left out, like those of writers.py.
_SAVERS = (keras.callbacks.ModelCheckpoint, callbacks.Checkpoint)
# Metrics that count rows of a class or beyond a threshold.
_COUNTING = tuple(
    getattr(keras.metrics, name)
    for name in (
        *("Accuracy", "BinaryAccuracy", "CategoricalAccuracy", "SparseCategoricalAccuracy", "TopKCategoricalAccuracy"),
        *("SparseTopKCategoricalAccuracy", "Precision", "Recall", "AUC", "TruePositives", "TrueNegatives"),
        *("FalsePositives", "FalseNegatives", "PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity"),
        *("SpecificityAtSensitivity", "IoU", "FBetaScore"),
    )
    if hasattr(keras.metrics, name)
)
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def begin(folder: Path, plan: Plan) -> None:
    """Records all training of this process in `folder`."""
    (folder / STARTED_FILE).touch()
    recorder = Recorder(folder, plan)
    observing.observe(recorder)
    sys.addaudithook(recorder.audit)


class Recorder:
    """See `observing.Observer`."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._writer: Writer | None = None
        self._steps = 0
        self._begun: set[str] = set()  # models and functions that have begun a step
        self._traces: dict[str, dict[str, Any]] = {}
        self._left_out: set[str] = set()
        self._dtypes: Counter[str] = Counter()  # dtypes of weights
        self._compute: set[str] = set()
        self._alone: set[str] = set()  # models made outside of the scope
        self._last_bits = np.random.Generator(np.random.Philox(7))
        self._without_values: list[tf.Variable] = []  # made in a traced step, so without a value yet
        self._names: dict[int, str] = {}  # names of tf.Variables, by id of their handles
        self._files: set[str] = set()
        self._own = str(folder.parent) + os.sep  # contains the copy of the working directory

    # ---- what the Strategy calls

    def begin_step(self, owner: str, model: Any) -> None:
        if self._steps >= self._plan.steps:
            self._end_program()
        if model is not None and owner not in self._begun and self._plan.last_bit and models.is_built(model):
            self._change_last_bits(each.value for each in model.trainable_variables)
        self._begun.add(owner)

    def end_step(self, owner: str, model: Any, variables: Sequence[Any], returned: Any) -> None:
        """Records the state after a step and what the step returned."""
        self._steps += 1
        if model is None:
            strategy = one_per_job.alive()[0]
            named = self._named(variables)
            trainable = [each for each in variables if each.trainable]
            arrays, kinds = self._read(named, gathered_slots.slots_in(variables) if strategy.is_several else [])
            if self._plan.last_bit and self._steps == 1:
                self._change_last_bits(trainable)  # weights that were restored since they were made
                self._without_values.clear()
            self._compute.add(keras.config.dtype_policy().compute_dtype)
        else:
            slots = []
            if strategy_of_ranks(model) is not None:
                accumulation.combine(model)
                slots = gathered_slots.slots_of(model)
            elif keras_compat.strategy_of(model) is None:
                self._alone.add(model.name)
            named = _unique((each.path, each) for each in _state(model))
            trainable = [each.value for each in model.trainable_variables]
            arrays, kinds = self._read(named, slots)
            self._change_last_bits(self._without_values)
            self._without_values.clear()
            layers = [each for each in models.layers_of(model) if getattr(each, "variables", None)]
            self._compute.update(each.compute_dtype for each in layers if each.compute_dtype)
            if model.run_eagerly:
                self._trace(f"{type(model).__name__}.train_step", {"the step, which runs eagerly": 1}, 1.0)
        self._dtypes.update({each.dtype.name for each in trainable if each.dtype.is_floating})
        for name, array in _outputs(returned).items():
            arrays[f"returned {name}"] = array
            kinds[f"returned {name}"] = COUNTS if _counts_rows(model, name) else "returned"
        self._add(Event(0, "step", owner, self._steps, kinds), arrays)

    def end_epoch(self, model: Any, logs: Any) -> None:
        arrays = {f"log {name}": array for name, array in _outputs(logs).items()}
        kinds = {f"log {name}": COUNTS if _counts_rows(model, name) else "logs" for name in _outputs(logs)}
        self._add(Event(0, "epoch", model.name, self._steps, kinds), arrays)

    def predicted(self, model: Any, outputs: Any) -> None:
        arrays = {f"output {name}": array for name, array in _outputs(outputs).items()}
        self._add(Event(0, "prediction", model.name, self._steps, dict.fromkeys(arrays, "outputs")), arrays)

    def made(self, variable: Any) -> None:
        if self._plan.last_bit and variable.trainable:
            with tf.init_scope():
                inner = models.inner_variable(variable)
                if isinstance(inner, tf.Variable) and inner.is_initialized():
                    self._change_last_bits([inner])
                elif isinstance(inner, tf.Variable):
                    self._without_values.append(inner)

    def traced(self, step: str, program: cut.Program, report: cut.Report) -> None:
        work = sum(cut.work_of(node.operation) for node in program.nodes)
        random = Counter[str]()
        for node in program.nodes:
            _count_draws(node.operation, random)
        parts = [report] if report.earlier is None else [report, report.earlier]
        replicated: Counter[str] = Counter()
        spent = 0.0
        for each in parts:
            replicated.update(each.replicated)
            replicated.update({f"{name}, {why}": 1 for (name, why), of_batch in each.kept.items() if of_batch})
            spent += sum(map(cut.work_of, each.replicated_operations))
        self._trace(
            step,
            dict(replicated),
            min(1.0, spent / work) if work else 0.0,
            random=dict(random),
            collectives=sum(entry.count for each in parts for entry in each.entries),
            bytes=sum(entry.bytes or 0 for each in parts for entry in each.entries),
        )

    def _trace(self, step: str, replicated: dict[str, int], share: float, **more: Any) -> None:
        """Notes facts about a step. Of several traces, or models of one class, keeps the one with the largest share."""
        known = self._traces.get(step)
        if known is None or known["replicated_share"] <= share:
            rest = {"random": {}, "collectives": 0, "bytes": 0, **more}
            self._traces[step] = {"replicated": replicated, "replicated_share": share, **rest}

    def callbacks_of_fit(self, chosen: Any) -> Any:
        is_list = isinstance(chosen, keras.callbacks.CallbackList)
        every = list(
            chosen.callbacks if is_list else [chosen] if isinstance(chosen, keras.callbacks.Callback) else chosen or []
        )
        kept = [each for each in every if not _writes_files(each)]
        self._left_out.update(type(each).__name__ for each in every if not any(each is other for other in kept))
        if not is_list:
            return kept
        chosen.callbacks = kept
        return chosen

    # ---- values

    def _read(self, named: Mapping[str, Any], slots: Sequence[Any]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Returns the values and the kinds of variables. COLLECTIVE if there are slots."""
        with gathered_slots.gathered(slots):
            arrays = {name: _array(each) for name, each in named.items()}
        trainable = {name for name, each in named.items() if each.trainable}
        return arrays, {name: _kind(name, is_weight=name in trainable) for name in arrays}

    def _named(self, variables: Sequence[Any]) -> dict[str, Any]:
        """Returns tf.Variables by the paths of their Keras variables, or by their own names."""
        if any(id(each.handle) not in self._names for each in variables):
            for each in gc.get_objects():
                if issubclass(type(each), keras.Variable):  # isinstance would follow weak references
                    inner = models.inner_variable(each)
                    if isinstance(inner, tf.Variable):
                        self._names[id(inner.handle)] = each.path
        return _unique((self._names.setdefault(id(each.handle), each.name), each) for each in variables)

    def _change_last_bits(self, variables: Iterable[Any]) -> None:
        """Changes each entry by one unit in the last place, up or down. It does not use the program's generators."""
        for each in variables:
            epsilon = _EPSILON.get(each.dtype.name)
            if epsilon is not None:
                signs = self._last_bits.integers(0, 2, tuple(each.shape)) * 2.0 - 1.0
                each.assign(each * tf.cast(1.0 + epsilon * signs, each.dtype))

    # ---- the recording

    def _add(self, event: Event, arrays: dict[str, np.ndarray]) -> None:
        if self._writer is None:
            rank = communicator.rank() if communicator.is_initialized() else 0
            self._writer = Writer(self._folder, rank)
        self._writer.add(event, arrays)
        self._writer.facts(self._facts())

    def _facts(self) -> dict[str, Any]:
        """Returns the facts about this run that do not depend on the step: settings, dtypes, seeds, versions."""
        strategies = one_per_job.alive()
        seed = tf_compat.global_seed()
        return {
            "ranks": communicator.size() if communicator.is_initialized() else 1,
            "strategy": [
                {
                    "options": {name: repr(value) for name, value in vars(each.job.settings).items()},
                    "chosen": _chosen(each),
                }
                for each in strategies
            ],
            "environment": config.chosen(),
            "floatx": keras.config.floatx(),
            "dtypes": sorted(self._dtypes),
            "compute_dtypes": sorted(self._compute),
            "epsilon": _coarsest(self._dtypes),
            "compute_epsilon": _coarsest(self._compute),
            "seed": seed,
            "seeded_by": "verify" if seed == self._plan.seed else "the program",
            "traces": self._traces,
            "callbacks_left_out": sorted(self._left_out),
            "trained_alone": sorted(self._alone),
            "files_written": sorted(self._files),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "versions": {
                "keras_ddl": config.version(),
                "keras": keras.__version__,
                "tensorflow": tf.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Notes files that Python opens for writing. Runs at every audit event, so it must be quick and never raise."""
        if name != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[2], int):
            return
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.abspath(arguments[0])  # noqa: PTH100
            if not path.startswith((*_NO_FILES, self._own, *_JOB_FOLDERS)) and ".pyc." not in path:
                self._files.add(path)

    def _end_program(self) -> None:
        """Ends this rank at once, without running more of the program's code. All ranks end at this point."""
        if self._writer is not None:
            self._writer.facts({**self._facts(), "ended_after_steps": self._steps})
        if communicator.is_initialized():
            communicator.barrier(name="observe/verify/end")
            communicator.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


_NO_FILES = ("/dev/", "/proc/", "/sys/")
_TEMPORARY = tempfile.gettempdir()
_JOB_FOLDERS = tuple(
    f"{folder}/keras_ddl-" for folder in (_TEMPORARY, os.path.realpath(_TEMPORARY))
)  # prefixes of paths


def _coarsest(dtypes: Iterable[str]) -> float:
    """Returns the largest relative unit in the last place of some dtypes."""
    return max((_EPSILON.get(each, 0.0) for each in dtypes), default=0.0)


def _chosen(strategy: Any) -> list[str]:
    """Returns the names of a Strategy's settings that differ from the default."""
    defaults = {name: each.default for name, each in inspect.signature(Strategy.__init__).parameters.items()}
    return [name for name, value in vars(strategy.job.settings).items() if value != defaults[name]]


def _state(model: Any) -> list[Any]:
    """Returns the variables of a model and its optimizers, each once, except metrics' variables, which logs show."""
    metric_ids = {id(each) for each in models.metric_variables(model)}
    optimizers = [variable for each in models.optimizers_of(model) for variable in each.variables]
    variables = {id(each): each for each in (*model.variables, *optimizers)}
    return [each for key, each in variables.items() if key not in metric_ids]


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns name -> second element of the pairs; a repeated name gets a number."""
    seen: Counter[str] = Counter()
    result = {}
    for name, each in pairs:
        seen[name] += 1
        result[name if seen[name] == 1 else f"{name} #{seen[name]}"] = each
    return result


def _array(variable: Any) -> np.ndarray:
    return _plain(variable.numpy())


def _plain(value: Any) -> np.ndarray:
    """Returns an array of a dtype that NumPy stores: bfloat16 and the like as float32."""
    array = np.asarray(value)
    return array if array.dtype.kind in "fiubUS" else array.astype(np.float32)


def _kind(name: str, *, is_weight: bool) -> str:
    """Returns the kind of a variable: "weights", or its role for a layer or a weight, such as "momentum"."""
    return "weights" if is_weight else name.partition(" #")[0].rpartition("/")[2].rpartition("_")[2]


def _outputs(returned: Any) -> dict[str, np.ndarray]:
    """Returns the numbers in the result of a step or a call, by their places."""
    if isinstance(returned, Mapping):
        parts: Iterable[tuple[str, Any]] = ((str(name), each) for name, each in returned.items())
    elif isinstance(returned, (list, tuple)):
        parts = ((str(place), each) for place, each in enumerate(returned))
    else:
        if isinstance(returned, (tf.Tensor, tf.Variable, np.ndarray, np.generic, float, int)):
            array = tf_compat.as_array(returned)
            return {"value": _plain(array)} if array.dtype.kind not in "OSU" else {}
        return {}
    return {
        name if inner == "value" else f"{name}/{inner}": array
        for name, each in parts
        for inner, array in _outputs(each).items()
    }


def _writes_files(callback: Any) -> bool:
    return isinstance(callback, _SAVERS) or (
        writers.writing_class(callback) is not None and not isinstance(callback, keras.callbacks.ProgbarLogger)
    )


def _counts_rows(model: Any, log: str) -> bool:
    """Whether a log of a model is a metric that counts rows: "accuracy", "val_accuracy", "first_accuracy"."""
    counting = [] if model is None else [each for each in models.metrics_in(model) if isinstance(each, _COUNTING)]
    # compile(metrics=["accuracy"]) chooses the class that fits the labels.
    plain = log.rpartition("/")[2]
    return any(plain == each.name or plain.endswith(f"_{each.name}") for each in counting)


def _count_draws(operation: tf.Operation, draws: Counter[str]) -> None:
    """Counts the operations that draw random numbers, by the way they draw."""
    kind = operation.type
    if kind.startswith("Stateless") and ("Random" in kind or "Shuffle" in kind or "Truncated" in kind):
        if "GetKeyCounter" not in kind and "GetAlg" not in kind:
            draws["from seeds (counter-based)"] += 1
    elif kind.startswith(("RngReadAndSkip", "StatefulRandom", "StatefulUniform", "StatefulStandardNormal")):
        draws["from tf.random.Generator"] += 1
    elif cut.draws_in_kernels(operation.node_def):
        draws["in kernels"] += 1
    for graph in tf_compat.graphs_of(operation):
        for each in graph.get_operations():
            _count_draws(each, draws)
