"""What of a model is served that is never called itself, on real ranks. Run by test_served_parts.py."""

import numpy as np
from callbacks.common import shared_folder
from callbacks.parts import Net

from keras_ddl import callbacks, export
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ExportError
from strategy.common import RANK, STRATEGY, X, keras, set_precision


class Gan(keras.Model):
    """Two parts, and an optimizer each; never called itself."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = Net(X.shape[1]), Net(1)
        self.optimizers = {"g": keras.optimizers.Adam(0.01), "d": keras.optimizers.SGD(0.02, momentum=0.9)}

    def train_step(self, data):
        rows, latent = data
        for part, sign in ((self.critic, 1.0), (self.generator, -1.0)):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(
                    (self.critic(self.generator(latent, training=True)) - sign * self.critic(rows)) ** 2
                )
            weights = part.trainable_variables
            self.optimizers["d" if part is self.critic else "g"].apply(tape.gradient(loss, weights), weights)
        return {"g_loss": loss}


def check_parts_of_a_gan_are_served_and_all_of_it_resumes():
    set_precision("float32")
    keras.utils.set_random_seed(5)
    latent = np.random.default_rng(4).normal(size=X.shape).astype(np.float32)
    with STRATEGY.scope():
        model = Gan()
        model.compile()

    def train(*parts, **epochs):
        arguments = {"batch_size": 10, "shuffle": False, "verbose": 0, **epochs}
        return model.fit(X, latent, callbacks=list(parts), **arguments).history["g_loss"]

    def state():
        return [*model.variables, *(each for one in model.optimizers.values() for each in one.variables)]

    with shared_folder() as folder:

        def checkpoint(**options):
            return callbacks.Checkpoint(folder, monitor="g_loss", **options)

        try:
            train(checkpoint())
        except ExportError as error:
            assert "Pass serve=['generator', 'critic']" in str(error) and (RANK == 0 or "rank 0: " in str(error)), error
        else:
            raise AssertionError("no error")
        served = {"serve": ["generator", "critic"], "sample": {"generator": latent[:3]}}
        train(checkpoint(**served), epochs=2)
        expected = train(initial_epoch=2, epochs=3)
        end = [variable.numpy() for variable in state()]
        for variable in state():
            variable.assign(keras.ops.zeros_like(variable))
        assert train(checkpoint(resume=True, **served), epochs=3) == expected
        for variable, value in zip(state(), end, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
        if RANK == 0:
            for name in ("generator", "critic"):
                result = export.export_saved_model(folder, folder / name, model=name, validate="here")
                assert "as the trained model did" in result.proof, result.proof
