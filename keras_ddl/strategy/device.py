"""The device of a rank."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf


def choose_device(local_rank: int) -> str:
    """Returns this rank's device: the GPU numbered local_rank when there are GPUs, else the CPU."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "/device:CPU:0"
    number = local_rank % len(gpus)
    try:
        # Else every rank would take memory on every GPU.
        tf.config.set_visible_devices(gpus[number], "GPU")
        number = 0
    except RuntimeError:
        pass  # TensorFlow has started already: all GPUs are visible
    return f"/device:GPU:{number}"
