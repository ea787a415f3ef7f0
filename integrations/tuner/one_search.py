"""Changes a KerasTuner tuner for several ranks: rank 0 decides and writes, and a failure on one rank fails the trial.

It relies on KerasTuner's documentation for subclasses (1.4.8): `run_trial`, `search`, the summaries, `populate_space`,
`update_trial` and `end_trial` of oracles, and the attributes `oracle`, `directory` and `project_name`. Only the path of
weights is not documented there.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

from keras_ddl import communicator, config
from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.compat import replacing
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, KerasDdlError, RankError, of_other_rank
from keras_ddl.files.scratch import scratch_folder
from keras_ddl.strategy import one_per_job

_CHIEF = "KERASTUNER_ORACLE_IP"


def _is_several() -> bool:
    return communicator.is_initialized() and communicator.size() > 1


def _is_other() -> bool:
    return _is_several() and communicator.rank() != 0


class OneSearch:
    """The first base class of a tuner that searches on all ranks."""

    oracle: Any
    directory: Any
    project_name: Any
    hypermodel: Any
    _scratch: tempfile.TemporaryDirectory[str] | None = None  # on ranks other than 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of the tuner's class. COLLECTIVE, like all other methods."""
        if _is_several():
            _check_setting()
        with _silence():  # hides KerasTuner's "Reloading", and prints of the model built to learn the space
            super().__init__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Adapts oracle, directory and project_name, which KerasTuner sets in this order when it makes a tuner."""
        if _is_several():
            if name == "oracle":
                _decide_on_rank_0(value)
            elif name == "directory" and _is_other():
                self._shared_directory = os.fspath(value)
                self._scratch = scratch_folder("tuner", config.get("RUN_DIR"))
                value = self._scratch.name
        super().__setattr__(name, value)
        if name == "project_name" and _is_several():
            self._copy_notes()

    def search(self, *args: Any, **kwargs: Any) -> Any:
        """Searches like the tuner's own method. Only rank 0 shows tables and progress bars, for any `verbose`."""
        if _is_other():
            kwargs["verbose"] = 0
        return super().search(*args, **kwargs)  # type: ignore[misc]

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a trial like the tuner's own method. A trial that fails on one rank fails on all.

        Raises: keras_tuner.errors.FatalRuntimeError: the ranks are no longer in step, so no other trial can run.
        """
        from keras_tuner import errors

        result, problem = None, None
        try:
            result = super().run_trial(trial, *args, **kwargs)  # type: ignore[misc]
        except Exception as error:  # raised by the user's functions
            if not _is_several():
                raise
            if isinstance(error, KerasDdlError) and not isinstance(error, RankError):
                raise errors.FatalRuntimeError(f"{type(error).__name__}: {error}") from error
            problem = error
        if _is_several():
            _fail_together(problem, errors)
        return result

    def search_space_summary(self, *args: Any, **kwargs: Any) -> Any:
        """Works like the tuner's own method, on rank 0 only."""
        with _silence():
            return super().search_space_summary(*args, **kwargs)  # type: ignore[misc]

    def results_summary(self, *args: Any, **kwargs: Any) -> Any:
        """Works like the tuner's own method, on rank 0 only."""
        with _silence():
            return super().results_summary(*args, **kwargs)  # type: ignore[misc]

    def _get_checkpoint_fname(self, trial_id: Any) -> str:
        """Makes all ranks save and load a trial's weights in rank 0's folder, where one rank writes."""
        path: str = super()._get_checkpoint_fname(trial_id)  # type: ignore[misc]
        if self._scratch is None:
            return path
        inside = os.path.relpath(path, self._scratch.name)
        path = os.path.join(self._shared_directory, inside)  # noqa: PTH118
        tf.io.gfile.makedirs(os.path.dirname(path))  # noqa: PTH120
        return path

    def _copy_notes(self) -> None:
        """Gives the other ranks KerasTuner's files in the folder of this search, except the weights."""
        name = f"integrations/tuner/{self.project_name}/notes"
        notes = on_first_rank(lambda: _notes_in(os.path.join(self.directory, self.project_name)), name)  # noqa: PTH118
        if self._scratch is not None:
            for inside, text in notes.items():
                path = Path(self._scratch.name, self.project_name, inside)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)


def _check_setting() -> None:
    if _CHIEF in os.environ:
        raise ConfigError(
            f"A search on all ranks uses only the oracle of rank 0. Received: {_CHIEF}={os.environ[_CHIEF]} (rank "
            f"{communicator.rank()}), which tells KerasTuner to run different trials in each process. Unset {_CHIEF}. "
            "If you want different trials in each process, leave out keras_ddl.tuner.on_all_ranks and the Strategy."
        )
    if any(strategy.job.goes_on for strategy in one_per_job.alive()):
        raise ConfigError(
            "A search on all ranks cannot continue without a lost rank, because only rank 0 has the oracle. Received: "
            f"a job with -np MIN:MAX (rank {communicator.rank()}). Give a fixed number of ranks, -np N. With "
            "--restarts N the script starts again after a loss, and the search resumes at the unfinished trial."
        )


def _decide_on_rank_0(oracle: Any) -> None:
    """Makes all ranks' oracles take rank 0's choices and results. The oracle's methods are then COLLECTIVE."""

    def populate_space(original: Any, trial_id: Any) -> Any:
        return on_first_rank(lambda: original(trial_id), "integrations/tuner/trial")

    def update_trial(original: Any, trial_id: Any, metrics: Any, step: Any = 0) -> Any:
        metrics, step = communicator.broadcast_object((metrics, step), name="integrations/tuner/results")
        return original(trial_id, metrics, step=step)

    def end_trial(original: Any, *args: Any, **kwargs: Any) -> Any:
        with _silence():
            return original(*args, **kwargs)

    replacing.replace([(oracle, each.__name__, each) for each in (populate_space, update_trial, end_trial)])
    if _is_other():
        oracle.verbose = 0


def _fail_together(problem: Exception | None, errors: Any) -> None:
    """Raises this rank's exception in a trial, or else that of the first rank that has one. COLLECTIVE."""
    mine = (
        None
        if problem is None
        else (
            isinstance(problem, errors.FatalError),
            isinstance(problem, errors.FailedTrialError),
            f"{type(problem).__name__}: {problem}",
        )
    )
    everyone = communicator.all_gather_object(mine, name="integrations/tuner/failed")
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(everyone):
        if theirs is not None:
            is_fatal, is_final, text = theirs
            kind = errors.FatalRuntimeError if is_fatal else errors.FailedTrialError if is_final else RankError
            raise of_other_rank(kind(f"rank {rank}: {text}"), rank)


def _notes_in(folder: str) -> dict[str, str]:
    """Returns path inside the folder -> text for KerasTuner's JSON files."""
    paths = [path for pattern in ("*.json", "*/*.json") for path in tf.io.gfile.glob(os.path.join(folder, pattern))]  # noqa: PTH118
    notes = {}
    for path in paths:
        with tf.io.gfile.GFile(path) as file:
            notes[os.path.relpath(path, folder)] = file.read()
    return notes


def _silence() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO()) if _is_other() else contextlib.nullcontext()
