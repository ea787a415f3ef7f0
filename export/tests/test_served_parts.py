"""Models whose training step never calls them (a GAN): exports of their parts, and complete resumes."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

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
    loaded = tf.saved_model.load(str(version))  # kept, because signatures do not keep the variables alive
    function = loaded.signatures["serving_default"]
    (name,) = function.structured_input_signature[1]
    return next(iter(function(**{name: tf.constant(rows)}).values())).numpy()


class Gan(keras.Model):
    """Two networks, each with an optimizer; training never calls the model, and its compiled optimizer is idle."""

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


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["rmsprop", None])
def test_resumed_gan_continues_with_both_optimizers(tmp_path, optimizer):
    whole = make_gan(optimizer)
    expected = fit(whole, epochs=4)
    fit(make_gan(optimizer), checkpointing(tmp_path, export_base=False))
    assert steps(tmp_path) == [6, 12]  # the critic takes 2 steps in each of 3 batches
    resumed = make_gan(optimizer)
    history = fit(resumed, checkpointing(tmp_path, export_base=False, resume=True), epochs=4)
    assert history == {name: values[2:] for name, values in expected.items()}
    for mine, one in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, one)
    for name, each in resumed.optimizers.items():
        for mine, one in zip(each.variables, whole.optimizers[name].variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), one.numpy())


def test_resume_names_an_optimizer_that_the_model_lacks(tmp_path):
    fit(make_gan(None), checkpointing(tmp_path, export_base=False), epochs=1)
    other = make_gan(None)
    other.optimizers = {"g": other.optimizers["g"]}
    with pytest.raises(CheckpointError, match="with 'optimizers/d'; the model has .'optimizers/g'."):
        fit(other, checkpointing(tmp_path, export_base=False, resume=True))


# ---- served parts --------------------------------------------------------------------------------------------------


class Net(keras.Model):
    """Creates its variables in the first batch, and keeps its layers in a list."""

    def __init__(self, units):
        super().__init__()
        self.blocks = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(units)]

    def call(self, rows, training=False):
        for block in self.blocks:
            rows = block(rows, training=training)
        return rows


class LateGan(Gan):
    def __init__(self):
        super().__init__()
        self.built = False
        self.generator, self.critic = Net(3), Net(1)


@pytest.mark.parametrize("kind", [Gan, pytest.param(LateGan, marks=pytest.mark.long)])
def test_each_part_is_exported_and_checked(tmp_path, kind):
    model = kind()
    model.compile(None)
    folder, out = tmp_path / "ckpt", tmp_path / "out"
    fit(model, checkpointing(folder), callbacks.ExportBase(serve=["generator", "critic"], sample={"generator": Z}))
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
    # A new run moves them aside.
    fit(make_gan(None), checkpointing(folder), callbacks.ExportBase(serve="generator"), epochs=1)
    bases = lambda folder: sorted(entry.name for entry in folder.glob("base*"))  # noqa: E731
    assert bases(folder) == ["base-generator"] and bases(folder / "previous-1") == ["base-critic", "base-generator"]
    # The only part needs no name.
    assert "as the trained model did" in export.export_saved_model(folder, out, validate="here").proof
    with pytest.raises(ExportError, match="base graphs of generator.*--model generator"):
        export.export_saved_model(folder, out, model="critic")


@pytest.mark.long
def test_custom_loop_exports_parts(tmp_path):
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


@pytest.mark.parametrize("serve", [[], 3, {"a b": "generator"}, ["student.encoder"], {"g": 3}, ""])
def test_serve_must_name_parts(serve):
    with pytest.raises(ConfigError, match="serve must be an attribute.*Received"):
        callbacks.ExportBase(serve=serve)


def test_options_of_several_parts_map_names():
    for sample in (Z, {"critics": X}):
        with pytest.raises(
            ConfigError,
            match=r"sample must map the name of each part to its value. The names are \['critic', 'generator'\]",
        ):
            callbacks.ExportBase(serve=["critic", "generator"], sample=sample)
