"""The options of `keras-ddl export`, and its closing message."""

from pathlib import Path

import pytest

from harness.launching import cpu_seconds_of_children
from keras_ddl.errors import ConfigError
from keras_ddl.export import EncodedImages
from keras_ddl.export.command import describe, parse_tensors, parse_version, parse_which
from keras_ddl.export.graft import ExportResult
from keras_ddl.export.signature_options import parse_signatures
from launch.launching import run


def test_parse_tensors():
    assert parse_tensors(None) is None
    assert parse_tensors("scores=net/logits:0, x:0") == {"scores": "net/logits:0", "x": "x:0"}
    assert parse_tensors("net/logits") == {"net_logits": "net/logits"}
    for text in ("", "=x:0", "a=x:0,a=y:0"):
        with pytest.raises(ConfigError, match="each name once. Received"):
            parse_tensors(text)


def test_parse_which_and_version():
    assert [parse_which(text) for text in ("latest", "best", "120")] == ["latest", "best", 120]
    assert [parse_version(text) for text in (None, "step", "7")] == [None, "step", 7]
    with pytest.raises(ConfigError):
        parse_which("-1")
    with pytest.raises(ConfigError):
        parse_version("latest")


def test_parse_signatures():
    images = "from_image:scale=1/255,mean=0.5 1/4 0,std=2,size=4x6,antialias=yes,fit=crop,outputs=a b,name=file_bytes"
    assert parse_signatures(["serving_default:a, b", "c:x=dense_7"], ["plain", images]) == {
        "serving_default": {"a": "a", "b": "b"},
        "c": {"x": "dense_7"},
        "plain": EncodedImages(),
        "from_image": EncodedImages(
            scale=1 / 255,
            mean=[0.5, 0.25, 0.0],
            std=2.0,
            size=(4, 6),
            antialias=True,
            fit="crop",
            outputs=["a", "b"],
            name="file_bytes",
        ),
    }


@pytest.mark.parametrize(
    ("by_names", "by_images", "said"),
    [
        (["a"], [], "NAME:OUTPUT,.*Received: 'a'"),
        (["a:b,,c"], [], "NAME:OUTPUT,.*Received: 'a:b,,c'"),
        (["a:b,b"], [], "each once"),
        (["a:b", "a:c"], [], "Received: 'a' twice"),
        (["a:b"], ["a"], "Received: 'a' twice"),
        ([], ["a:scale=big"], "options of input, .*Received: 'scale=big'.*big"),
        ([], ["a:scale=1/0"], "Received: 'scale=1/0'"),
        ([], ["a:zoom=2"], "unknown option"),
        ([], ["a:size=4"], "Received: 'size=4'"),
        ([], ["a:bgr=1"], "must be yes or no"),
        ([], ["a:mean="], "a number is missing"),
    ],
)
def test_parse_signatures_refuses_invalid_text(by_names, by_images, said):
    with pytest.raises(ConfigError, match=said):
        parse_signatures(by_names, by_images)


def test_describe_names_the_export_and_how_to_serve_it(tmp_path: Path):
    result = ExportResult(
        path=tmp_path / "7",
        version=7,
        step=120,
        epoch=3,
        metrics={"val_loss": 0.123456},
        bytes=1_234_567,
        seconds={"graft": 0.5, "replay": 1.25},
        proof="replayed 8 rows",
        warnings=("a warning",),
    )
    text = describe(result, "digits")
    assert f"Wrote {tmp_path / '7'} (version 7, 1.2 MB)" in text
    assert "step 120, epoch 3, val_loss 0.1235" in text
    assert "1.75 s (graft 0.50 s, replay 1.25 s)" in text
    assert "warning: a warning" in text and "replayed 8 rows" in text
    assert f"keras-ddl serve digits={tmp_path}\n" in text
    assert f"-v {tmp_path}:/models/digits -e MODEL_NAME=digits tensorflow/serving" in text
    usual = describe(result, "model")  # spelled as in `keras-ddl serve --help`
    assert f"keras-ddl serve {tmp_path}\n" in usual
    assert f"docker run --rm -p 8500:8500 -p 8501:8501 -v {tmp_path}:/models/model tensorflow/serving\n" in usual


def test_export_of_missing_directory_is_one_clear_message(tmp_path: Path):
    before = cpu_seconds_of_children()
    ended = run(["export", "no-checkpoints", "out"], tmp_path)
    assert ended.status == 1, ended
    assert ended.err.startswith("keras-ddl: CheckpointError: CHECKPOINTS must be a directory"), ended
    assert cpu_seconds_of_children() - before < 10
