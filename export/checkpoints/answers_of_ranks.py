"""Computes a served model's outputs for its sample in a step of all ranks, when each rank has parts of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.names import plain_name
from keras_ddl.errors import DeadlineError, ExportError, RankLostError
from keras_ddl.export import signatures
from keras_ddl.export.inference.inputs import find_inputs
from keras_ddl.export.inference.isolation import isolated, unchanged
from keras_ddl.export.inference.replay import storable
from keras_ddl.export.signatures import declarations
from keras_ddl.export.tracing.tracer import Elsewhere, differing, own_rows
from keras_ddl.strategy.shards import gathered_slots


class AnswersOfRanks:
    """Runs the live model in inference mode on all ranks together, on rank 0's sample.

    Args:
        model: the model, whose weights are split between the ranks.
        part: the part of the model that is served, or the model.
        options: as in `export.write_base_graph`.
    Cost: one trace, then a step on the sample for each answer.
    """

    def __init__(self, model: Any, part: Any, options: Mapping[str, Any]) -> None:
        self._model, self._name = model, f"Checkpoint/{plain_name(part.name)}/answers"
        sample, further = options.get("sample"), (options.get("classify"), options.get("regress"))
        self._is_given = sample is not None
        declared = declarations.read(options.get("signatures"), functions=True, taken=signatures.METHODS)
        inputs = find_inputs(part, options.get("input_signature"), sample)
        rows = inputs.flatten(sample) if self._is_given else inputs.made_up_sample()
        trace = isolated(lambda: signatures.trace(part, inputs, *further, float32_outputs=True, declared=declared))
        self._rows = communicator.broadcast_object({**rows, **own_rows(trace, declared)}, name=self._name)
        self._runs = True  # equal on all ranks
        self._step: Callable[..., dict[str, Any]] = keras_compat.strategy_of(model).function(trace.live)

    def elsewhere(self) -> Elsewhere:
        """Returns what the base graph needs to know about the model. COLLECTIVE.

        Raises: ExportError, on every rank: the model does not run on the user's sample.
        """
        spread = [each for each in self._model.variables if gathered_slots.spread_in([each])]
        first, problem = self._try()
        second, problem = self._try() if problem is None else (None, problem)
        self._runs = problem is None
        if first is None or second is None:
            if self._is_given:
                raise ExportError(f"The model must run on sample=. Received: {problem}. Give rows as in fit.")
            return Elsewhere(None, (), spread)
        return Elsewhere(self._rows, differing(first, second), spread)

    def answer(self) -> dict[str, Any] | None:
        """Returns name -> output on every rank; None: the model has failed. COLLECTIVE."""
        return self._try()[0] if self._runs else None

    def _try(self) -> tuple[dict[str, Any] | None, str | None]:
        """Returns the outputs, and the failures of the model with their ranks. COLLECTIVE."""
        outputs, problem = None, None
        try:
            outputs = self._run()
        except (RankLostError, DeadlineError):
            raise
        except Exception as error:  # a model's code may raise anything
            problem = f"{type(error).__name__}: {error}"
        problems = communicator.all_gather_object(problem, name=f"{self._name}/problems")
        failed = next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)
        return (outputs, None) if failed is None else (None, failed)

    def _run(self) -> dict[str, Any]:
        # Inference changes only small variables such as seeds, which every rank has in full.
        state = [v for v in self._model.variables if not v.trainable and not gathered_slots.spread_in([v])]
        with unchanged([each.value for each in state]), gathered_slots.inference(True):
            outputs = self._step(**self._rows)
        return {name: storable(tensor.numpy()) for name, tensor in outputs.items()}
