"""Transfer learning and its like: after the scope, programs do what plain Keras allows. Run by test_strategy.py.

Only the first lines of each program are in the scope; everything else is as one process has it.
"""

import contextlib

import numpy as np

from harness.rank_program import long
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from strategy.common import RNG, STRATEGY, X, Y, keras
from strategy.oracle import Trained, case, fit

ops, layers, optimizers = keras.ops, keras.layers, keras.optimizers
LABELS = (X @ RNG.normal(size=(6, 3))).argmax(axis=1)


def base_model():
    inputs = keras.Input((6,))
    hidden = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(inputs))
    return keras.Model(inputs, layers.Dropout(0.2)(layers.Dense(5, activation="tanh")(hidden)), name="base")


def base_of(scope):
    with scope:
        return base_model()


def with_head(scope):
    with scope:
        base = base_model()
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(2)(base(inputs, training=False)))
        model.compile(optimizers.Adam(1e-2), "mse")
    return base, model


def of_the_job(scope, model):
    """The model, which all ranks train together, and none alone."""
    assert isinstance(scope, contextlib.nullcontext) or keras_compat.strategy_of(model) is STRATEGY
    return model


def several(*trained):
    """What several fits have left."""
    logs = {f"{number} {key}": each.logs[key] for number, each in enumerate(trained) for key in each.logs}
    return Trained(trained[-1].model, logs)


@case()
def check_the_base_is_trained_in_the_second_fit(scope):
    base, model = with_head(scope)
    base.trainable = False
    model.compile(optimizers.Adam(1e-2), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    first = fit(model)
    base.trainable = True
    model.compile(optimizers.Adam(1e-4), "mse", metrics=["mae", keras.metrics.R2Score()])
    second = fit(model, validation_split=0.3)
    return several(first, second)


@long
@case()
def check_layers_are_unfrozen_one_by_one(scope):
    base, model = with_head(scope)
    fits = []
    for number in range(len(base.layers)):
        for each in base.layers:
            each.trainable = False
        for each in base.layers[-1 - number :]:
            each.trainable = not isinstance(each, layers.BatchNormalization)
        model.compile(optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 20), momentum=0.9, nesterov=True), "mse")
        fits.append(fit(model, epochs=1))
    return several(*fits)


@case()
def check_a_head_is_made_outside_of_the_scope(scope):
    base = base_of(scope)
    base.trainable = False
    model = keras.Model(base.input, layers.Dense(3, activation="softmax")(base.output))
    model.compile(optimizers.AdamW(1e-2, clipnorm=0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    first = fit(of_the_job(scope, model), y=LABELS)
    base.trainable = True
    model.compile(optimizers.RMSprop(1e-3, momentum=0.5), keras.losses.SparseCategoricalCrossentropy())
    second = fit(model, y=LABELS)
    loss = model.evaluate(X, LABELS, batch_size=10, verbose=0)
    predicted = model.predict(X, batch_size=10, verbose=0)
    return several(first, second, Trained(model, {"loss": loss, "predicted": predicted}))


@long
@case()
def check_a_list_of_layers_around_the_base(scope):
    base = base_of(scope)
    model = keras.Sequential([layers.GaussianNoise(0.1), base, layers.Dense(4, activation="relu"), layers.Dense(2)])
    model.compile("adam", "mse")  # its layers are built by fit
    return fit(of_the_job(scope, model))


@long
@case()
def check_layers_of_the_scope_that_are_built_later(scope):
    with scope:
        shared = layers.Dense(4, activation="tanh")
    model = keras.Sequential([shared, layers.Dense(2)])
    model.compile(optimizers.Nadam(1e-2), "mse")
    return fit(of_the_job(scope, model))


@case()
def check_a_feature_extractor_and_its_parent_are_trained_in_turns(scope):
    base, model = with_head(scope)
    first = fit(model)
    part = keras.Model(base.input, base.layers[1].output)
    features = part.predict(X, batch_size=10, verbose=0)
    part.compile(optimizers.Adagrad(0.1), lambda y, p: ops.mean((y - p[:, :2]) ** 2, axis=-1))
    second = fit(of_the_job(scope, part))
    model.compile(model.optimizer, "mse")
    return several(first, second, Trained(model, {"features": features}), fit(model))


@case()
def check_optimizers_inside_of_others(scope):
    base, model = with_head(scope)
    inner = optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9)
    model.compile(optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=3), "mse")
    return fit(model)


@long
@case()
def check_an_average_takes_the_weights_place(scope):
    _, model = with_head(scope)
    model.compile(optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8), "mse")
    return fit(model)


@long
@case()
def check_accumulated_gradients(scope):
    _, model = with_head(scope)
    model.compile(optimizers.Adam(1e-2, gradient_accumulation_steps=2), "mse", steps_per_execution=2)
    return fit(model)


@case()
def check_optimizers_of_configurations(scope):
    _, model = with_head(scope)
    fits = []
    for chosen in ("nadam", {"class_name": "Adam", "config": {"learning_rate": 1e-3}}, optimizers.get("adamax")):
        model.compile(chosen, "mse")
        fits.append(fit(model, epochs=1))
    model.optimizer = optimizers.SGD.from_config(optimizers.SGD(0.02, momentum=0.5).get_config())
    model.train_function = None
    return several(*fits, fit(model, epochs=1))


@case()
def check_an_optimizer_that_was_built_outside(scope):
    _, model = with_head(scope)
    optimizer = optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    return fit(model)


@long
@case()
def check_an_optimizer_keeps_its_slots_over_compile(scope):
    base, model = with_head(scope)
    first = fit(model)
    old = model.optimizer
    model.compile(optimizers.SGD(0.01), "mse")
    second = fit(model)
    model.compile(old, "mse", metrics=["mae"])
    return several(first, second, fit(model))


@long
@case()
def check_losses_and_metrics_with_variables_of_their_own(scope):
    class Moving(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.mean = keras.Variable(np.zeros(2), trainable=False, name="mean")

        def call(self, y, p):
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(p, axis=0))
            return ops.mean((y - p) ** 2 + (p - self.mean) ** 2, axis=-1)

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.of_all = self.add_variable((), "zeros", name="of_all")

        def update_state(self, y, p, sample_weight=None):
            self.of_all.assign(ops.maximum(self.of_all, ops.max(ops.abs(y - p))))

        def result(self):
            return self.of_all

    _, model = with_head(scope)
    loss = Moving()
    model.compile(optimizers.Ftrl(0.05), loss, metrics=[Largest()], weighted_metrics=[keras.metrics.MeanSquaredError()])
    trained = fit(model, sample_weight=np.linspace(0.1, 1, len(X)))
    return Trained(model, {**trained.logs, "mean": loss.mean.numpy()})


@long
@case()
def check_a_gan_gets_its_optimizers_in_compile(scope):
    class Gan(keras.Model):
        def __init__(self, generator, critic):
            super().__init__()
            self.generator, self.critic = generator, critic

        def compile(self, of_generator, of_critic):
            super().compile()
            self.of_generator, self.of_critic = of_generator, of_critic

        def train_step(self, data):
            rows, _ = data
            noise = keras.random.normal((ops.shape(rows)[0], 3), seed=5)
            losses = {}
            for name, sign in (("critic", 1), ("generator", -1)):
                with tf.GradientTape() as tape:
                    loss = sign * ops.mean(self.critic(self.generator(noise)) - self.critic(rows))
                weights = getattr(self, name).trainable_variables
                getattr(self, f"of_{name}").apply(tape.gradient(loss, weights), weights)
                losses[name] = loss
            return losses

    with scope:
        gan = Gan(
            keras.Sequential([keras.Input((3,)), layers.Dense(6)]),
            keras.Sequential([keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]),
        )
    gan.compile(optimizers.Adam(1e-3, beta_1=0.5), optimizers.RMSprop(1e-3))
    logs = fit(gan).logs
    return Trained(gan, logs, [gan.of_generator, gan.of_critic])


@long
@case()
def check_a_teacher_is_a_clone_of_the_student(scope):
    class Student(keras.Model):
        def __init__(self, student):
            super().__init__()
            self.student, self.teacher = student, None

        def call(self, x, training=False):
            return self.student(x, training=training)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self.student(x, training=True)
                loss = ops.mean((p - y) ** 2) + ops.mean((p - self.teacher(x)) ** 2)
            weights = self.student.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            for mine, theirs in zip(self.teacher.weights, self.student.weights):
                mine.assign(0.9 * mine + 0.1 * theirs)
            return {"loss": loss}

    with scope:
        model = Student(keras.Sequential([base_model(), layers.Dense(2)]))
        model.student.build((None, 6))
    model.teacher = keras.models.clone_model(model.student)
    model.teacher.trainable = False
    model.teacher.set_weights(model.student.get_weights())
    model.compile(optimizers.Lion(1e-3))
    return fit(model)


@case()
def check_folds_are_clones(scope):
    _, model = with_head(scope)
    fits = []
    for number in range(2):
        clone = keras.models.clone_model(model)
        clone.compile(optimizers.Adamax(1e-2), "mse", metrics=["mae"])
        rows = np.arange(len(X)) % 2 == number
        fits.append(fit(of_the_job(scope, clone), X[rows], Y[rows], validation_data=(X[~rows], Y[~rows])))
    return several(*fits)


@long
@case()
def check_a_learning_rate_finder_and_the_training_after_it(scope):
    class Finder(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.found = []

        def on_train_begin(self, logs=None):
            self.weights = self.model.get_weights()

        def on_train_batch_end(self, batch, logs=None):
            self.found.append((float(self.model.optimizer.learning_rate), logs["loss"]))
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 1.5
            if len(self.found) > 6:
                self.model.stop_training = True

        def on_train_end(self, logs=None):
            self.model.set_weights(self.weights)

    _, model = with_head(scope)
    model.compile(optimizers.SGD(1e-4), "mse")
    finder = Finder()
    fit(model, callbacks=[finder], epochs=3)
    best = min(finder.found, key=lambda each: each[1])[0]
    model.compile(optimizers.SGD(best / 10, momentum=0.9), "mse")
    return several(Trained(model, {"found": finder.found}), fit(model))


@long
@case()
def check_a_loop_by_hand_after_a_fit(scope):
    base, model = with_head(scope)
    first = fit(model, epochs=1)
    base.trainable = False
    optimizer = optimizers.Adam(1e-3)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step = tf.function(step) if isinstance(scope, contextlib.nullcontext) else STRATEGY.function(step)
    losses = [float(step(X[first : first + 10], Y[first : first + 10])) for first in range(0, 40, 10)]
    model.compile(optimizer, "mse")
    return several(first, Trained(model, {"loss": losses}), fit(model, epochs=1))


@long
@case()
def check_weights_are_kept_and_loaded_between_fits(scope):
    base, model = with_head(scope)
    kept = [each.numpy() for each in base.weights]
    first = fit(model)
    base.set_weights(kept)
    other = keras.Sequential([base, layers.Dense(2, name="other")])
    other.build((None, 6))
    other.layers[-1].set_weights(model.layers[-1].get_weights())
    other.compile(optimizers.Adadelta(0.5), "mse")
    return several(first, fit(of_the_job(scope, other)))


@long
@case()
def check_two_heads_share_the_base(scope):
    base = base_of(scope)
    inputs = keras.Input((6,))
    x = base(inputs)
    heads = {"numbers": layers.Dense(2, name="numbers")(x), "kinds": layers.Dense(3, name="kinds")(x)}
    model = keras.Model(inputs, heads)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizers.Adam(1e-2),
        loss={"numbers": "mse", "kinds": crossentropy},
        loss_weights={"numbers": 1.0, "kinds": 0.2},
        metrics={"kinds": [keras.metrics.SparseCategoricalAccuracy()]},
    )
    return fit(of_the_job(scope, model), y={"numbers": Y, "kinds": LABELS})
