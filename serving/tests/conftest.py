from pathlib import Path

import pytest

from harness.serving import serving, write_model


@pytest.fixture(scope="session")
def versions(tmp_path_factory) -> Path:
    """SavedModels to copy: version n multiplies by n."""
    folder = tmp_path_factory.mktemp("versions")
    for version in (1, 2, 3):
        write_model(folder / str(version), float(version))
    return folder


@pytest.fixture(scope="module")
def server(versions):
    """A server of version 3."""
    with serving(versions, "--allow-reload-config") as running:
        running.wait_for(3)
        yield running


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Versions of a model of pixels and of sparse tags, as keras_ddl exports it: `from_image` takes files of images."""
    import keras

    from keras_ddl import export, model_state

    folder = tmp_path_factory.mktemp("pictures")
    pixels, tags = keras.Input((4, 4, 3), name="pixels"), keras.Input((6,), sparse=True, name="tags")
    outputs = {
        "brightness": keras.layers.GlobalAveragePooling2D(name="colors")(pixels),
        "score": keras.layers.Dense(1, kernel_initializer="ones", name="head")(tags),
    }
    model = keras.Model({"pixels": pixels, "tags": tags}, outputs)
    base = export.write_base_graph(model, folder, signatures={"from_image": export.EncodedImages(scale=1 / 255)})
    model_state.save_checkpoint(model, folder, 1, base=base)
    signatures = {"score": ["score"]}
    export.export_saved_model(folder, folder / "versions", validate="here", signatures=signatures)
    return folder / "versions"
