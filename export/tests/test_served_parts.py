"""Models whose training step never calls them (a GAN): what of them is served, and that a resume has all of them."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from callbacks.parts import Net

from harness.rank_tests import rank_tests
from keras_ddl import callbacks, export, model_state
from keras_ddl import checkpoint as ckpt
from keras_ddl.errors import CheckpointError, ConfigError, ExportError

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Z = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)


def fit(model, *parts, epochs=2):
    return model.fit(X, X, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(parts)).history


def checkpointing(folder, **options):
    return callbacks.Checkpoint(folder, **{"monitor": "d_loss", **options})


def steps(folder):
    return [each.step for each in ckpt.list_checkpoints(folder)]


def answer(version: Path, rows):
    loaded = tf.saved_model.load(str(version))  # kept: its signatures do not keep the variables alive
    function = loaded.signatures["serving_default"]
    (name,) = function.structured_input_signature[1]
    return next(iter(function(**{name: tf.constant(rows)}).values())).numpy()


class Gan(keras.Model):
    """Two networks, an optimizer each, a training step that never calls the model; the compiled optimizer is idle."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        self.critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizers = {"g": keras.optimizers.Adam(0.01), "d": keras.optimizers.Adam(0.02, beta_1=0.5)}
        self.seeds = keras.random.SeedGenerator(3)
        self.built = True

    def train_step(self, data):
        x, _ = data
        noise = keras.random.normal((4, 2), seed=self.seeds)
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self.critic(self.generator(noise)) - self.critic(x))
            weights = self.critic.trainable_variables
            self.optimizers["d"].apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            value = -keras.ops.mean(self.critic(self.generator(noise)))
        weights = self.generator.trainable_variables
        self.optimizers["g"].apply(tape.gradient(value, weights), weights)
        return {"d_loss": loss, "g_loss": value}


def make_gan(optimizer):
    keras.utils.set_random_seed(5)
    model = Gan()
    model.compile(optimizer)
    return model


@pytest.mark.parametrize("optimizer", ["rmsprop", None])
def test_resume_of_a_gan_goes_on_with_both_optimizers(tmp_path, optimizer):
    whole = make_gan(optimizer)
    expected = fit(whole, epochs=4)
    fit(make_gan(optimizer), checkpointing(tmp_path, export_base=False))
    assert steps(tmp_path) == [6, 12]  # of the critic, 2 in each of 3 batches
    resumed = make_gan(optimizer)
    history = fit(resumed, checkpointing(tmp_path, export_base=False, resume=True), epochs=4)
    assert history == {name: values[2:] for name, values in expected.items()}
    for mine, one in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, one)
    for name, each in resumed.optimizers.items():
        for mine, one in zip(each.variables, whole.optimizers[name].variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), one.numpy())


def test_resume_names_an_optimizer_that_the_model_does_not_have(tmp_path):
    fit(make_gan(None), checkpointing(tmp_path, export_base=False), epochs=1)
    other = make_gan(None)
    other.optimizers = {"g": other.optimizers["g"]}
    with pytest.raises(CheckpointError, match="with 'optimizers/d'; the model has .'optimizers/g'."):
        fit(other, checkpointing(tmp_path, export_base=False, resume=True))


# ---- what is served --------------------------------------------------------------------------------------------------


class LateGan(Gan):
    def __init__(self):
        super().__init__()
        self.built = False
        self.generator, self.critic = Net(3), Net(1)


def test_a_model_without_call_is_refused_at_the_start_with_what_to_pass(tmp_path):
    begun = []
    count = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: begun.append(batch))
    with pytest.raises(ExportError, match=r"no call\(\). Pass serve=\['generator', 'critic'\].*or export_base=False"):
        fit(make_gan(None), checkpointing(tmp_path), count)
    assert begun == []
    with pytest.raises(ExportError, match=r"no call\(\). Write one for each part"):
        export.write_base_graph(make_gan(None), tmp_path, sample=Z)


def test_a_model_that_its_step_does_not_call_is_refused_after_the_first_batch(tmp_path):
    class Callable(Gan):
        def call(self, rows):
            return self.critic(rows)

    class OwnStep(Callable):
        def __init__(self):
            super().__init__()
            self.built = False

    for kind in (Callable, OwnStep):
        model, begun = kind(), []
        model.compile(None)
        count = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs, begun=begun: begun.append(batch)
        )
        with pytest.raises(
            ExportError, match=r"first training step has not called. Pass serve=\['generator', 'critic'\]"
        ):
            fit(model, count, checkpointing(tmp_path))
        assert begun == [0, 1]
    # Told what its inputs are, it is served itself.
    model = OwnStep()
    model.compile(None)
    fit(model, checkpointing(tmp_path, sample=X))
    path = export.export_saved_model(tmp_path, tmp_path / "out", validate="here").path
    np.testing.assert_allclose(answer(path, X), model.critic(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Gan, LateGan])
def test_parts_are_exported_each_with_its_proof(tmp_path, kind):
    model = kind()
    model.compile(None)
    folder, out = tmp_path / "ckpt", tmp_path / "out"
    fit(model, checkpointing(folder, serve=["generator", "critic"], sample={"generator": Z}))
    assert not (folder / "base").exists()
    for name, rows in (("generator", Z), ("critic", X)):
        result = export.export_saved_model(folder, out / name, model=name, validate="here")
        assert (
            f"answers {5 if name == 'generator' else 2} rows in this process as the trained model did" in result.proof
        )
        np.testing.assert_allclose(answer(result.path, rows), getattr(model, name)(rows), rtol=1e-5, atol=1e-6)
        record = json.loads((result.path / "assets.extra" / "keras_ddl_export.json").read_text())
        assert record["model"] == name
    for wrong in (None, "encoder"):
        with pytest.raises(ExportError, match="base graphs of critic, generator.*--model critic"):
            export.export_saved_model(folder, out, model=wrong)
    # A run that starts anew moves them out of the way.
    fit(make_gan(None), checkpointing(folder, serve="generator"), epochs=1)
    bases = lambda folder: sorted(entry.name for entry in folder.glob("base*"))  # noqa: E731
    assert bases(folder) == ["base-generator"] and bases(folder / "previous-1") == ["base-critic", "base-generator"]
    # The only part needs no name.
    assert "as the trained model did" in export.export_saved_model(folder, out, validate="here").proof
    with pytest.raises(ExportError, match="base graphs of generator.*--model generator"):
        export.export_saved_model(folder, out, model="critic")


class Distiller(keras.Model):
    """A student whose variables and inputs are known after the first batch, and a teacher that does not learn."""

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        self.teacher = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.teacher.trainable = False

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.student(data[0]) - self.teacher(data[0])) ** 2)
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"d_loss": loss}


def make_distiller():
    model = Distiller()
    model.compile("sgd")
    return model


def test_parts_may_have_names_of_their_own(tmp_path):
    model = make_distiller()
    with pytest.raises(ExportError, match=r"Received: 'half', which is list in Distiller.*\['student', 'teacher'\]"):
        fit(model, checkpointing(tmp_path, serve={"half": "student.layers"}))
    serve = {"small": "student", "same": model.student, "big": "teacher"}
    fit(model, checkpointing(tmp_path, serve=serve, regress={"small": export.Regress()}), epochs=1)
    out = {
        name: export.export_saved_model(tmp_path, tmp_path / name, model=name, validate="here").path for name in serve
    }
    for name, part in (("small", model.student), ("same", model.student), ("big", model.teacher)):
        np.testing.assert_allclose(answer(out[name], X), part(X), rtol=1e-5, atol=1e-6)
    signatures = {name: set(tf.saved_model.load(str(path)).signatures) for name, path in out.items()}
    default = {"serving_default"}
    assert signatures == {"small": {*default, "regress"}, "same": default, "big": default}


@pytest.mark.long
def test_parts_are_published_each_in_a_directory_of_its_own(tmp_path):
    model = make_distiller()
    options = {"serve": ["student", "teacher"], "publish_to": tmp_path / "served"}
    fit(model, checkpointing(tmp_path / "ckpt", **options))
    for name in options["serve"]:
        expected = getattr(model, name)(X)
        np.testing.assert_allclose(answer(tmp_path / "served" / name / "6", X), expected, rtol=1e-5, atol=1e-6)
    fit(model, checkpointing(tmp_path / "one", serve="student", publish_to=tmp_path / "alone"), epochs=1)
    (version,) = (tmp_path / "alone").iterdir()
    np.testing.assert_allclose(answer(version, X), model.student(X), rtol=1e-5, atol=1e-6)


def test_parts_are_served_from_a_loop_of_ones_own(tmp_path):
    model = make_gan(None)
    parts = {"generator": model.generator, "critic": model.critic}
    bases = [export.write_base_graph(part, tmp_path, name=name, whole=model) for name, part in parts.items()]
    model.generator.layers[0].kernel.assign_add(keras.ops.ones((2, 3)))
    model_state.save_checkpoint(model, tmp_path, 1, base=bases)
    path = export.export_saved_model(tmp_path, tmp_path / "out", model="generator", validate="here").path
    np.testing.assert_allclose(answer(path, Z), model.generator(Z), rtol=1e-5, atol=1e-6)
    with pytest.raises(ExportError, match="'other' with .*which Gan 'gan.*' lacks"):
        export.write_base_graph(make_gan(None).critic, tmp_path, name="other", whole=model)
    for name in (None, "a/b", "a.b", ""):
        with pytest.raises(ExportError, match="needs a name of letters"):
            export.write_base_graph(model.critic, tmp_path, name=name, whole=model)


def test_a_part_that_answers_otherwise_than_its_graph_is_refused(tmp_path):
    class Scaled(keras.layers.Layer):
        scale = 1.0

        def call(self, rows):
            return rows * self.scale

    model = make_gan(None)
    model.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), Scaled()])
    later = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model.generator.layers[-1], "scale", 2.0)
    )
    fit(model, later, checkpointing(tmp_path, serve=["generator", "critic"]), epochs=1)
    with pytest.raises(ExportError, match="must give the model's outputs"):
        export.export_saved_model(tmp_path, tmp_path / "out", model="generator", validate="here")
    assert export.export_saved_model(tmp_path, tmp_path / "out", model="critic", validate="here")


@pytest.mark.parametrize("serve", [[], 3, {"a b": "generator"}, ["student.encoder"], {"g": 3}, ""])
def test_serve_names_parts(tmp_path, serve):
    with pytest.raises(ConfigError, match="serve must be an attribute.*Received"):
        checkpointing(tmp_path, serve=serve)


def test_options_of_several_parts_are_by_name(tmp_path):
    for sample in (Z, {"critics": X}):
        with pytest.raises(ConfigError, match=r"sample must be a mapping from their names, \['critic', 'generator'\]"):
            checkpointing(tmp_path, serve=["critic", "generator"], sample=sample)
    with pytest.raises(ConfigError, match="publish_to and serve need the base graph.*export_base=False"):
        checkpointing(tmp_path, serve="critic", export_base=False)


test_parts_on_ranks = pytest.mark.long(rank_tests(Path(__file__).with_name("part_checks.py"), [2, 3]))
