"""The Strategy: trains Keras models data-parallel, one process per device. See `Strategy`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.communicator.transports import membership
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import order
from keras_ddl.device import configure_tensorflow
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import cluster, keras_patches, one_per_job, resilience
from keras_ddl.strategy.agreement.random_state import RandomState
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.calls.tracing import sees_global_batch
from keras_ddl.strategy.function import StepFunction
from keras_ddl.strategy.job import Settings, agree_on_job, check_settings
from keras_ddl.strategy.mesh import layout_of
from keras_ddl.strategy.saving.save_records import SaveRecords
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.step.cut_step import ALONE
from keras_ddl.strategy.step.keras_step import KerasSteps, execution_of


class Strategy(BaseStrategy):
    """Synchronous data-parallel training: one process per device, each global batch split by rows over the ranks.

        strategy = keras_ddl.Strategy()
        with strategy.scope():
            model = keras.Sequential([...])
            model.compile("adam", "mse", metrics=["mae"])
        model.fit(x, y, batch_size=64)          # 64 rows over all ranks

    All ranks run the same script with the same data, and each rank computes its rows of every batch. On every rank
    weights, losses, metrics and predictions are those of one process with the global batch. Rank 0 writes checkpoints
    and logs, and shows the progress bar. A Strategy made before TensorFlow starts also divides the host's cores, as
    TensorFlow threads, among its ranks, unless the script has set a number of threads.

    `Strategy()` again returns the latest Strategy of the job, or the latest with the arguments that are passed. New
    arguments make another Strategy, and a model made under one is refused under another.

    Args:
        seed: sets all random seeds as keras.utils.set_random_seed does, every time that it is passed. Default: the
            seeds that the script has set, if all ranks have set the same ones, else rank 0's.
        batch_statistics: which rows BatchNormalization normalizes with in fit and `strategy.function`. "global": those
            of the global batch, as in one process. "rank": each rank's own rows, without a collective, as in Horovod
            and PyTorch's DDP; the moving statistics are the mean over ranks, weighted by rows. Layers with
            synchronized=True always use the global batch.
        sharding: None: every rank has all variables. "optimizer": each rank keeps and updates its share of the
            optimizer's variables for large weights (ZeRO stage 1). Ranks send as many bytes as with None, and memory
            and time of the update are divided by the number of ranks. "weights": each rank also keeps only its share of
            large weights made in the scope, which a step gathers before it uses them, and then frees (ZeRO stage 3).
            Ranks send 1.5 times as many bytes. Both work with Keras's entrywise optimizers, in fit and `function`; rank
            0's setting is used. See `whole_optimizer` and `whole_model`.
        layout: cuts variables over model ranks; the results stay those of one process (docs/mesh.md). A
            keras.distribution.LayoutMap over a mesh of the job's ranks (`keras_ddl.device_mesh`) says which variables
            are cut along which axis. Given a number of model ranks, a divisor of the number of ranks, keras_ddl chooses
            a layout when the first step is traced, and prints it; until then each rank has all weights.
        data_layout: with a LayoutMap: for each axis of the data, the axis of the mesh that cuts it, or None.
            ("batch", "model") gives each model rank its part of the positions of sequences [batch, positions, ...].
        compression: "bfloat16" or "float16": gradients of weights are rounded to that dtype between hosts, for slow
            networks. Inside a host they stay float32, and they are always added as float32. Rounding errors are added
            to the next step's gradients (docs/strategy.md). Everything else stays exact. Must be equal on all ranks.
        reader: which ranks read the data of fit, evaluate, predict and `experimental_distribute_dataset`. "all": every
            rank, so the data must be the same on all ranks. "rank0": rank 0 reads ahead of the steps and sends each
            rank its rows, for data that differs each time it is read (docs/strategy.md). Rank 0's setting is used.
        gather_predictions: the result of `model.predict`. "all": all rows, on every rank. "rank0": all rows on rank 0,
            and a rank's own rows on every other rank, for predictions too large for the memory of every rank.
        positional, removed: arguments of other strategies and of earlier versions; an error names the replacement.
    Raises:
        ConfigError: another tf.distribute scope is active. DependencyError: Keras does not run on TensorFlow.
    COLLECTIVE over all ranks.
    """

    is_keras_ddl = True  # lets compat.keras recognize a Strategy without importing this module

    def __init__(
        self,
        *positional: Any,
        seed: int | None = None,
        batch_statistics: str = "global",
        sharding: str | None = None,
        layout: keras.distribution.LayoutMap | int | None = None,
        data_layout: Sequence[str | None] | None = None,
        compression: str | None = None,
        reader: str = "all",
        gather_predictions: str = "all",
        **removed: Any,
    ) -> None:
        cluster.check_arguments(positional, removed)
        topology = communicator.init()
        self._check_no_other_scope(topology.rank)
        if hasattr(self, "job"):  # __new__ returned an existing Strategy
            if seed is not None:
                self.random_state = RandomState(self.size, seed)
            return
        settings = Settings(batch_statistics, sharding, layout, data_layout, compression, reader, gather_predictions)
        check_settings(settings, topology.rank)
        mesh_layout = layout_of(layout, data_layout, topology)
        device = configure_tensorflow(topology)
        keras_patches.install()
        cluster.refuse_preemption_handlers()
        self.topology, self.rank, self.size = topology, topology.rank, topology.size
        self.random_state = RandomState(self.size, seed)
        self.job = agree_on_job(settings, mesh_layout, topology, device, resilience.is_possible())
        if self.is_several:
            self.saves = SaveRecords(self.job.token, self.rank)
            keras_patches.install(shards=self.job.shards_from_elements is not None or self.job.mesh is not None)
        if self.job.reads_on_rank_0:
            self._check_rank_0_stays()
        self.resilience = resilience.current()
        self.mesh_layout = mesh_layout if self.job.goes_on else None
        from keras_ddl.strategy.distribute_loop.extended import DdlExtended  # the only import of distribute_loop

        super().__init__(DdlExtended(self, self.job))
        self.keras_steps = KerasSteps(self.job)
        self._functions = 0  # steps made by `function`; the number makes their collectives' names unique
        one_per_job.remember(self)

    def __new__(cls, *args: Any, **kwargs: Any) -> Strategy:
        return one_per_job.existing(cls, kwargs) or super().__new__(cls)

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # a copy of a model or an optimizer belongs to the same job

    def __repr__(self) -> str:
        own = " ".join(f"{name}={value!r}" for name, value in vars(self.job.settings).items())
        return f"<keras_ddl.Strategy rank={self.rank} size={self.size} device={self.job.device} {own}>"

    def _check_rank_0_stays(self) -> None:
        """Refuses a job that may continue without rank 0, because only rank 0 knows its position in the data."""
        if membership.can_ask():
            raise ConfigError(
                'With Strategy(reader="rank0") a job ends when a rank is lost: only rank 0 reads the data and knows '
                f"the position in it. Received: -np MIN:MAX (rank {self.rank}). Give a fixed number of ranks, -np N "
                "(--restarts 1 then starts the job again, with Checkpoint(..., resume=True) from the last checkpoint), "
                'or leave out reader="rank0" and give all ranks the same data.'
            )

    def _check_no_other_scope(self, rank: int) -> None:
        if tf.distribute.has_strategy():
            current = tf.distribute.get_strategy()
            if current is not self:
                raise ConfigError(
                    "A keras_ddl.Strategy must not be made or entered inside the scope of another strategy. "
                    f"Received: {type(current).__module__}.{type(current).__name__} is active (rank {rank}). "
                    "Leave its scope first; one Strategy serves any number of models."
                )

    def scope(self) -> Any:
        """Returns the context in which to make models, optimizers and metrics.

        Raises: ConfigError: the scope of another strategy is active.
        """
        self._check_no_other_scope(self.rank)
        return super().scope()

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """This rank's task, for scripts that ask for task_type, task_id and cluster_spec().

        It is a task of TF_CONFIG if that names as many tasks as there are ranks, else a worker. Rank 0 is the chief, or
        worker 0 if there is no chief.
        """
        return cluster.resolver(self.topology)

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Calls `fn` on this rank's values in replica context, by tf.distribute's convention. COLLECTIVE.

        Optimizers sum gradients over ranks, Keras losses are divided by the number of ranks, and your own losses must
        be divided by the global batch size. For the result of one process use `function`.

        A model's train_step, test_step or predict_step gives the result of one process, as in `fit`.

        Returns: the result of `fn` on this rank.
        Raises: RankMismatchError: ranks disagree. RankLostError: a rank is lost.
        """
        with order.translate_errors():
            execution = execution_of(fn) if self.size > 1 else None
            if execution is not None:  # a step of Keras has one meaning for all callers
                return self.keras_steps.run(execution, fn, args, kwargs or {})
            if self.job.mesh is not None:
                raise ConfigError(
                    "strategy.run calls the function unchanged on each rank, so it cannot use variables that a layout "
                    f"cuts: a rank holds only slices of them. Received: {fn!r} (rank {self.rank}). Use fit or "
                    "strategy.function."
                )
            return super().run(fn, args, kwargs, options)

    def function(
        self, step: Callable[..., Any] | None = None, *, batches: str = "global", reduce_retracing: bool = False
    ) -> Any:
        """Returns a function that runs `step` on all ranks with the result of one process.

        Also a decorator for functions and methods.

            @strategy.function
            def train_step(x, y):
                with tf.GradientTape() as tape:
                    loss = loss_fn(y, model(x, training=True))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)
                return loss

            for x, y in dataset:
                loss = train_step(x, y)

        `strategy.function` replaces tf.function in an otherwise unchanged loop: losses, metrics, clipping and several
        optimizers work as in one process. The step is traced on the global batch, and its graph is cut into one part
        per rank. Models and optimizers need no `strategy.scope()`; variables get rank 0's values when the step first
        uses them.

        Args:
            step: a function of tensors, or a tf.function. Tensors and arrays with as many rows (axis 0) as the first of
                them are the batch, which the ranks share by rows; every rank uses all other arguments in full.
            batches: "global": every rank passes the global batch, and computes its rows of it. "rank": each rank passes
                its own rows, and the batch is the rows of rank 0, then those of rank 1, and so on.
            reduce_retracing: as in tf.function. False: each size of batch is traced separately, and Python sees its
                shape. True: extents that change are left open in the trace, for batches of many sizes.
        Returns: a function of the same arguments, COLLECTIVE over all ranks. Its results are complete and equal on all
            ranks. Its method `explain()` lists the collectives of a step.
        Raises: ConfigError: `step` is not callable, or `batches` is invalid. RankMismatchError, on every rank, when the
            step is called: a digest shows that ranks were given different batches.
        Cost: operands of operations without a rule are gathered, and every rank computes these operations in full
            (docs/cut.md).
        """
        if batches not in ("global", "rank"):
            raise ConfigError(
                f"Strategy.function: batches must be 'global' or 'rank'. Received: batches={batches!r} (rank "
                f"{self.rank})."
            )
        if step is None:
            return lambda chosen: self.function(chosen, batches=batches, reduce_retracing=reduce_retracing)
        if not callable(step):
            raise ConfigError(
                f"Strategy.function needs a callable step. Received: {type(step).__name__} (rank {self.rank})."
            )
        self._functions += 1
        return StepFunction(
            step,
            batches=batches,
            reduce_retracing=reduce_retracing,
            strategy=self,
            number=self._functions,
        )

    def explain(self, model: Any) -> str:
        """Describes the communication of a model's traced steps (of fit, evaluate and predict).

        The result has a table for each trace, with bytes, reason and the program's line of each collective. Not
        collective. For a step of `function` call `train_step.explain()`.

        Raises: ConfigError: `model` was not made under this Strategy, or none of its steps has been traced.
        """
        if not isinstance(model, keras_compat.Trainer):
            raise ConfigError(
                f"Strategy.explain takes a Keras model. Received: {type(model).__name__} (rank {self.rank}). For a "
                "step that strategy.function returned, call train_step.explain()."
            )
        made_under = keras_compat.strategy_of(model)
        if made_under is not self:
            raise ConfigError(one_per_job.outside_message("A model", model.name, self, made_under))
        return ALONE if self.size == 1 else self.keras_steps.explain(model)

    def whole_optimizer(self, owner: Any) -> Any:
        """Returns a context in which every rank can read and save complete optimizer variables. COLLECTIVE on entry.

        This includes variables in shards (`sharding`).

            with strategy.whole_optimizer(model):
                model.save("model.keras")

        Args:
            owner: a model, for all its optimizers; or an optimizer.
        Raises: ConfigError: `owner` is neither. DriftError: some ranks assigned a variable and others did not.
        Cost: one all_gather of each variable in shards, and memory for all of them inside.
        """
        if not isinstance(owner, (keras.Model, keras.optimizers.Optimizer)):
            raise ConfigError(
                "whole_optimizer needs a model, or an optimizer. Received: "
                f"{owner!r} ({type(owner).__name__}) on rank {self.rank}. Pass the model that trains."
            )
        return self._whole(owner)

    def whole_model(self, model: keras.Model) -> Any:
        """Returns a context in which every rank can read and save complete variables of a model and its optimizers.

        This includes variables that a layout cuts or that are in shards. COLLECTIVE on entry.

            with strategy.whole_model(model):
                model.save("model.keras")

        Raises: ConfigError: `model` is not a model. DriftError: some ranks assigned a variable and others did not.
        Cost: one all_gather of each variable that is cut or in shards, and memory for all of them inside.
        """
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"whole_model needs a model. Received: {model!r} ({type(model).__name__}) on rank {self.rank}. Pass "
                "the model that trains; for an optimizer, use whole_optimizer."
            )
        return self._whole(model)

    @contextlib.contextmanager
    def _whole(self, owner: Any) -> Iterator[None]:
        slots = gathered_slots.slots_of(owner)
        gathered_slots.require_same_assignments(slots)
        with gathered_slots.gathered(slots):
            yield

    def reduce(self, reduce_op: Any, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Reduces this rank's `value` with those of the other ranks. COLLECTIVE over all ranks.

        Args:
            reduce_op: tf.distribute.ReduceOp or "SUM" | "MEAN".
            value: a tensor, or a structure of them.
            axis: also reduce along these dimensions; MEAN then weights each rank by its number of elements.
        Returns: the reduced structure, equal on all ranks.
        """
        return self.extended.reduce_structure(reduce_op, value, axis)

    def first_row(self) -> tf.Tensor:
        """Returns the position of this rank's first row in the global batch of the current step (int64 scalar).

        In the result of `keras_ddl.all_gather` of the batch, this rank's rows start at this index.
        """
        has_all_rows = self.size == 1 or sees_global_batch()
        return tf.zeros([], tf.int64) if has_all_rows else self.extended.share.first()

    def gather(self, value: Any, axis: int) -> tf.Tensor:
        """Concatenates the ranks' tensors along `axis`, in rank order; sizes along `axis` may differ. COLLECTIVE."""
        with ops.translate_errors():
            return super().gather(value, axis)


# Gives help() the signature. As a decorator of __new__, this would hide the class's type from type checkers.
functools.update_wrapper(Strategy.__new__, Strategy.__init__, assigned=())
