"""More programs as program_checks.py has them, for the long tests: one for each shape that people train in."""

from keras_ddl.compat.tensorflow import tf
from strategy.common import RNG, keras
from strategy.oracle import case
from strategy.program_checks import apply, ops, squares, train, train_step

Adam = keras.optimizers.Adam
NOISE, OF_ROWS = RNG.normal(size=(43, 6)), RNG.uniform(size=(43, 1))


# ---- losses ----------------------------------------------------------------------------------------------------------


@case()
def check_vicreg(scope):
    def loss(y, p):
        rows, centred = ops.cast(ops.shape(p)[0], p.dtype), p - ops.mean(p, axis=0)
        spread = ops.mean(ops.relu(1.5 - ops.sqrt(ops.var(centred, axis=0) + 1e-4)))
        covariance = ops.matmul(ops.transpose(centred), centred) / rows
        return 2 * ops.mean(squares(y, p)) + spread + ops.sum(covariance**2) - ops.sum(ops.diagonal(covariance) ** 2)

    return train(scope, loss)


@case()
def check_concordance(scope):
    def loss(y, p):
        mean_y, mean_p = ops.mean(y, axis=0), ops.mean(p, axis=0)
        covariance = ops.mean((y - mean_y) * (p - mean_p), axis=0)
        spread = ops.var(y, axis=0) + ops.var(p, axis=0) + (mean_y - mean_p) ** 2
        return 1 - ops.mean(2 * covariance / spread)

    return train(scope, loss)


@case()
def check_class_weights_counted_in_the_batch(scope):
    def loss(y, p):
        positive = ops.cast(y > 0, "float64")
        weight = ops.sum(1 - positive) / (ops.sum(positive) + 1e-7)
        return ops.mean(tf.nn.weighted_cross_entropy_with_logits(positive, p, pos_weight=weight))

    return train(scope, loss)


@case()
def check_rows_normalised_over_the_batch(scope):
    return train(scope, lambda y, p: ops.mean(squares(y, (p - ops.mean(p, axis=0)) / (ops.std(p, axis=0) + 0.1))))


@case()
def check_half_of_all_squares(scope):
    return train(scope, lambda y, p: tf.nn.l2_loss(y - p) * 0.01)


@case()
def check_tversky_and_focal(scope):
    def loss(y, p):
        truth, guess = ops.cast(y > 0, "float64"), ops.sigmoid(p)
        hit, missed = ops.sum(truth * guess), ops.sum(truth * (1 - guess))
        return (1 - (hit + 1) / (hit + 0.7 * missed + 0.3 * ops.sum((1 - truth) * guess) + 1)) ** 0.75

    return train(scope, loss)


@case()
def check_average_loss_of_tensorflow(scope):
    return train(scope, lambda y, p: tf.nn.compute_average_loss(tf.reduce_mean(squares(y, p), axis=-1)))


@case()
def check_free_bits(scope):
    return train(scope, lambda y, p: ops.sum(ops.maximum(ops.mean(squares(y, p), axis=0), 0.9)))


# ---- steps -----------------------------------------------------------------------------------------------------------


@case(tolerance=1e-13)
def check_sharpness_aware_step(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = model.compiled_mse(x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        moves = [0.05 * each / (norm + 1e-12) for each in gradients]
        for variable, move in zip(model.trainable_variables, moves):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            there = model.compiled_mse(x, y)
        gradients = tape.gradient(there, model.trainable_variables)
        for variable, move in zip(model.trainable_variables, moves):
            variable.assign_sub(move)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss, "there": there, "norm": norm}

    return train_step(scope, with_mse(step))


def with_mse(step):
    def stepping(model, x, y):
        model.compiled_mse = lambda x, y: ops.mean(squares(y, model(x)))
        return step(model, x, y)

    return stepping


@case(tolerance=1e-12)
def check_inner_step_of_maml(scope):
    def step(model, x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = ops.mean(squares(y, model(x)))
            moved = [w - 0.1 * g for w, g in zip(weights, inner.gradient(loss, weights))]
            after = ops.mean(squares(y, tf.tanh(x @ moved[0] + moved[1]) @ moved[2] + moved[3]))
        apply(model, outer, after)
        return {"loss": loss, "after": after}

    return train_step(scope, step)


@case(tolerance=1e-13)
def check_conflicting_gradients_projected(scope):
    def step(model, x, y):
        with tf.GradientTape(persistent=True) as tape:
            predicted = model(x)
            losses = ops.mean(squares(y, predicted)), 0.01 * ops.sum(ops.abs(predicted))
        first, second = (tape.gradient(loss, model.trainable_variables) for loss in losses)
        dot = sum(ops.sum(a * b) for a, b in zip(first, second))
        length = sum(ops.sum(b * b) for b in second)
        both = [ops.where(dot < 0, a - dot / length * b, a) + b for a, b in zip(first, second)]
        model.optimizer.apply(both, model.trainable_variables)
        return {"dot": dot, "first": losses[0], "second": losses[1]}

    return train_step(scope, step)


@case(tolerance=1e-12)
def check_penalty_on_gradients_of_weights(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = ops.mean(squares(y, model(x)))
            gradients = inner.gradient(loss, model.trainable_variables)
            loss = loss + 0.1 * sum(ops.sum(each**2) for each in gradients)
        apply(model, tape, loss)
        return {"loss": loss}

    return train_step(scope, step)


@case()
def check_advantages_normalised(scope):
    def step(model, x, y):
        advantage = (y[:, :1] - ops.mean(y[:, :1])) / (ops.std(y[:, :1]) + 1e-8)
        with tf.GradientTape() as tape:
            loss = -ops.mean(ops.log_softmax(model(x))[:, :1] * advantage)
        apply(model, tape, loss)
        return {"loss": loss}

    return train_step(scope, step)


@case()
def check_update_only_if_the_loss_is_small(scope):
    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(squares(y, model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        small = ops.cast(loss < 1.5, "float64")
        model.optimizer.apply([small * each for each in gradients], model.trainable_variables)
        return {"loss": loss, "small": small}

    return train_step(scope, step)
