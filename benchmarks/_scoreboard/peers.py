"""Starts each peer, and writes the parts of a program as the peer's documentation does.

A peer's constructor runs in its worker, after the variables of `environments` are set. Only there are TensorFlow, JAX
and PyTorch imported.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

TENSORFLOW_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # also keeps its notice out of the output
    "TF_NUM_INTRAOP_THREADS": "1",
}


class NotOffered(Exception):
    """The peer's documentation describes no way to run a program."""


class Peer:
    """Plain Keras in one process, which is the reference for the other peers and their base class."""

    name = "one process"
    about = "plain Keras"
    backend = "tensorflow"
    processes = 1
    tolerance = 0.0  # lower bound on the tolerance of every program
    sum_loss_factor = 1.0  # multiplies a loss that is a sum over rows
    logs = True  # its documentation says how to compute a training's logs
    fragile = False  # an error in one program may leave it unable to run the next

    def __init__(self, process: int) -> None:
        self.process = process

    @classmethod
    def environments(cls) -> list[dict[str, str]]:
        """Returns the environment variables to add for each process."""
        return [{"KERAS_BACKEND": cls.backend, **TENSORFLOW_ENVIRONMENT}] * cls.processes

    @classmethod
    def command(cls, python: str, arguments: list[str]) -> list[str]:
        return [python, *arguments]

    def begin(self) -> None:
        """Runs before each program, after Keras's state was cleared."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scaled(self, loss: Any) -> Any:
        """Returns a loss that the program computed by hand, divided as the peer's documentation demands."""
        return loss

    def fit(self, model: Any, x: Any, y: Any = None, **options: Any) -> dict[str, Any]:
        """Trains without shuffling; returns the logs of the epochs."""
        return model.fit(x, y, shuffle=False, verbose=0, **options).history

    def loop(self, model: Any, optimizer: Any, losses: Callable[[Any, Any], Any], x: Any, y: Any, batch: int) -> list:
        """Trains one epoch with a custom loop on the mean of `losses(y, predicted)`; returns the loss of each batch."""
        import tensorflow as tf

        @self.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses(y, model(x, training=True)))
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
            return loss

        return [float(step(x[n : n + batch], y[n : n + batch])) for n in range(0, len(x), batch)]

    def function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        return tf.function(step)


class KerasDdl(Peer):
    name = "keras_ddl"
    about = "keras_ddl.Strategy, 2 ranks"
    processes = 2

    def __init__(self, process: int) -> None:
        import keras_ddl

        self.strategy = keras_ddl.Strategy()
        super().__init__(self.strategy.rank)

    @classmethod
    def environments(cls) -> list[dict[str, str]]:
        return super().environments()[:1]  # the launcher starts both

    @classmethod
    def command(cls, python: str, arguments: list[str]) -> list[str]:
        return [python, "-m", "keras_ddl.cli", "run", "-np", "2", python, *arguments]

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope()

    def function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return self.strategy.function(step)


class Mirrored(Peer):
    name = "Mirrored"
    about = "tf.distribute.MirroredStrategy, 2 virtual CPUs"
    fragile = True

    def __init__(self, process: int) -> None:
        super().__init__(process)
        import tensorflow as tf

        cpus = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        self.strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope()

    def scaled(self, loss: Any) -> Any:
        return loss / self.strategy.num_replicas_in_sync

    def loop(self, model: Any, optimizer: Any, losses: Callable[[Any, Any], Any], x: Any, y: Any, batch: int) -> list:
        import tensorflow as tf

        def replica_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(losses(y, model(x, training=True)), global_batch_size=batch)
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
            return loss

        @tf.function
        def step(rows: Any) -> Any:
            losses_of_replicas = self.strategy.run(replica_step, args=rows)
            return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses_of_replicas, axis=None)

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
        return [float(step(rows)) for rows in self.strategy.experimental_distribute_dataset(data)]


class MultiWorker(Mirrored):
    name = "MultiWorker"
    about = "tf.distribute.MultiWorkerMirroredStrategy, 2 processes"
    processes = 2
    fragile = False  # both processes refuse fit (keras-team/keras#20585) before they exchange anything

    def __init__(self, process: int) -> None:
        Peer.__init__(self, process)
        import tensorflow as tf

        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @classmethod
    def environments(cls) -> list[dict[str, str]]:
        cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
        tasks = [{"cluster": cluster, "task": {"type": "worker", "index": index}} for index in range(2)]
        return [{**super(MultiWorker, cls).environments()[0], "TF_CONFIG": json.dumps(task)} for task in tasks]


class JaxProcess(Peer):
    name = "one process of JAX"
    backend = "jax"
    tolerance = 1e-5  # except on TensorFlow, Keras turns float64 into float32 in many operations (common/dtypes.py)

    @classmethod
    def environments(cls) -> list[dict[str, str]]:
        return [{"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}]

    def share(self, rows: Any) -> Any:
        """Places a batch where a custom loop needs it."""
        return rows

    def loop(self, model: Any, optimizer: Any, losses: Callable[[Any, Any], Any], x: Any, y: Any, batch: int) -> list:
        import jax
        from keras import ops

        def loss_of(trainable: Any, fixed: Any, x: Any, y: Any) -> Any:
            predicted, fixed = model.stateless_call(trainable, fixed, x, training=True)
            return ops.mean(losses(y, predicted)), fixed

        @jax.jit
        def step(state: Any, x: Any, y: Any) -> Any:
            trainable, fixed, slots = state
            (loss, fixed), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, fixed, x, y)
            trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
            return loss, (trainable, fixed, slots)

        variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        state = tuple([each.value for each in part] for part in variables)
        seen = []
        for n in range(0, len(x), batch):
            loss, state = step(state, self.share(x[n : n + batch]), self.share(y[n : n + batch]))
            seen.append(float(loss))
        for part, values in zip(variables, state):
            for variable, value in zip(part, values):
                variable.assign(value)
        return seen


class Jax(JaxProcess):
    name = "JAX"
    about = "keras.distribution.DataParallel on JAX, 2 virtual CPUs"

    def __init__(self, process: int) -> None:
        super().__init__(process)
        import keras

        self.distribution = keras.distribution.DataParallel()
        if self.distribution.num_model_replicas != 2:
            raise RuntimeError(f"JAX must have 2 devices. Received: {keras.distribution.list_devices()}")

    def begin(self) -> None:
        import keras

        keras.distribution.set_distribution(self.distribution)

    @classmethod
    def environments(cls) -> list[dict[str, str]]:
        return [{**super().environments()[0], "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}]

    def share(self, rows: Any) -> Any:
        import keras

        return keras.distribution.distribute_tensor(rows, self.distribution.get_data_layout(rows.shape))


class TorchProcess(Peer):
    name = "one process of torch"
    backend = "torch"
    tolerance = JaxProcess.tolerance

    def loop(self, model: Any, optimizer: Any, losses: Callable[[Any, Any], Any], x: Any, y: Any, batch: int) -> list:
        from keras import ops

        def loss_of(predicted: Any, y: Any) -> Any:
            return ops.mean(losses(y, predicted))

        seen = []
        for n in range(0, len(x), batch):
            x_rows, y_rows = (ops.convert_to_tensor(part[n : n + batch]) for part in (x, y))
            seen.append(float(step_of_torch(model, model, optimizer, loss_of, x_rows, y_rows)))
        return seen


def step_of_torch(called: Any, model: Any, optimizer: Any, loss_of: Callable[..., Any], x: Any, y: Any) -> Any:
    """Runs the step of Keras's guide on PyTorch loops; `called` is the model or its DistributedDataParallel wrapper."""
    import torch

    loss = loss_of(called(x, training=True), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        optimizer.apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)
    return loss


class Torch(TorchProcess):
    """DistributedDataParallel as in Keras's examples/demo_torch_multi_gpu.py: a loop, a DistributedSampler, no fit.

    Only its weights are compared, because the example computes no logs over all processes.
    """

    name = "torch DDP"
    about = "Keras on torch, DistributedDataParallel in a loop, 2 processes (gloo)"
    processes = 2
    sum_loss_factor = 2.0  # DistributedDataParallel averages gradients, as its documentation warns
    logs = False
    fragile = True

    def __init__(self, process: int) -> None:
        super().__init__(process)
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", rank=process, world_size=2)

    @classmethod
    def environments(cls) -> list[dict[str, str]]:
        (port,) = free_ports(1)
        return [{"KERAS_BACKEND": "torch", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}] * 2

    def fit(self, model: Any, x: Any, y: Any = None, **options: Any) -> dict[str, Any]:
        import keras

        if type(model).train_step is not keras.Model.train_step:
            raise NotOffered("DistributedDataParallel has no fit: a train_step becomes a loop")
        rest = options.keys() - {"batch_size", "epochs", "sample_weight"}
        if rest:
            raise NotOffered(f"DistributedDataParallel has no fit: {', '.join(sorted(rest))}")
        if model.steps_per_execution > 1 or model.jit_compile is True:
            raise NotOffered("DistributedDataParallel has no fit: steps_per_execution, jit_compile")
        weights = options.get("sample_weight")
        self._train(
            model,
            model.optimizer,
            lambda predicted, y, *weight: model.compute_loss(None, y, predicted, *weight),
            [part for part in (x, y, weights) if part is not None],
            options["batch_size"],
            options["epochs"],
        )
        return {}

    def loop(self, model: Any, optimizer: Any, losses: Callable[[Any, Any], Any], x: Any, y: Any, batch: int) -> list:
        from keras import ops

        self._train(model, optimizer, lambda predicted, y: ops.mean(losses(y, predicted)), [x, y], batch, 1)
        return []

    def _train(
        self, model: Any, optimizer: Any, loss_of: Callable[..., Any], parts: list[Any], batch: int, epochs: int
    ) -> None:
        import keras
        import torch

        class Rows(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(keras.tree.flatten(parts)[0])

            def __getitem__(self, n: int) -> Any:
                return keras.tree.map_structure(lambda part: part[n], parts)

        def tensors(part: Any) -> Any:
            kind = keras.config.floatx() if part.is_floating_point() else None
            return keras.ops.convert_to_tensor(part, dtype=kind)

        called = torch.nn.parallel.DistributedDataParallel(model)
        sampler = torch.utils.data.distributed.DistributedSampler(Rows(), shuffle=False)
        loader = torch.utils.data.DataLoader(Rows(), batch_size=batch // 2, sampler=sampler)
        optimizer.build(model.trainable_variables)
        for _ in range(epochs):
            for x, *rest in loader:
                x, rest = keras.tree.map_structure(tensors, (x, rest))
                model.zero_grad()
                loss = loss_of(called(x, training=True), *rest)
                getattr(optimizer, "scale_loss", lambda loss: loss)(loss).backward()
                with torch.no_grad():
                    optimizer.apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)
        optimizer.finalize_variable_values(model.trainable_weights)  # as fit does, and as Keras asks of loops


def free_ports(count: int) -> list[int]:
    """Returns free ports of this host."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


REFERENCES: Mapping[str, type[Peer]] = {each.backend: each for each in (Peer, JaxProcess, TorchProcess)}
PEERS: Mapping[str, type[Peer]] = {each.name: each for each in (KerasDdl, Mirrored, MultiWorker, Jax, Torch)}
EVERY = {each.name: each for each in (*REFERENCES.values(), *PEERS.values())}
