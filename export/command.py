"""keras-ddl export: converts a checkpoint to a SavedModel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from keras_ddl.checkpoint.listing import list_bases
from keras_ddl.cli.sizes import size_text
from keras_ddl.compat.tensorflow_packages import import_without_keras
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.export.signature_options import parse_signatures
from keras_ddl.launch.output import startup_notes

if TYPE_CHECKING:
    from keras_ddl.export.graft import ExportResult

USUAL_MODEL_NAME = "model"  # default of keras-ddl serve, keras-ddl predict and TensorFlow Serving's image


@click.command("export", short_help="Turn a checkpoint into a SavedModel for serving.")
@click.argument("checkpoints", metavar="CHECKPOINTS", required=False)
@click.argument("output", metavar="OUTPUT", required=False)
@click.option("--which", default="latest", show_default=True, help="latest, best, or a step.", metavar="WHICH")
@click.option("--metric", help="The metric that decides which is best; default: the monitored one.", metavar="NAME")
@click.option(
    "--mode",
    type=click.Choice(["auto", "min", "max"]),
    default="auto",
    show_default=True,
    help="Whether the lowest or the highest value of the metric is best.",
)
@click.option("--version", help="A number, or 'step'; default: the highest in OUTPUT plus one.", metavar="N")
@click.option("--keep", type=click.IntRange(min=1), help="Keep only the N highest versions.", metavar="N")
@click.option("--model", help="The part of the model, by its name in ExportBase(serve=...).", metavar="NAME")
@click.option(
    "--signature",
    multiple=True,
    help="Add signature NAME with these outputs or layers; serving_default:... chooses those of the default one; "
    "repeatable.",
    metavar="NAME:OUTPUT,...",
)
@click.option(
    "--encoded-images",
    multiple=True,
    help="A signature that takes JPEG and PNG files, as in from_image:scale=1/255,resize=bilinear; repeatable.",
    metavar="NAME:OPTION=VALUE,...",
)
@click.option("--weights", help="Take the weights from this file instead.", metavar="FILE")
@click.option(
    "--model-name", default=USUAL_MODEL_NAME, show_default=True, help="The model's name on the server.", metavar="NAME"
)
@click.option("--no-verify", is_flag=True, help="Do not replay the stored sample.")
@click.option("--no-warmup", is_flag=True, help="Do not store warm-up requests for the server.")
@click.option(
    "--format",
    type=click.Choice(["saved_model", "onnx", "tflite"]),
    default="saved_model",
    show_default=True,
    help="Output format; for onnx and tflite CHECKPOINTS may be a SavedModel.",
)
@click.option("--opset", type=int, help="With --format onnx; default: the converter's.", metavar="N")
@click.option("--quantize", type=click.Choice(["float16", "dynamic"]), help="With --format tflite: smaller weights.")
@click.option("--check", metavar="VERSION", help="Only check whether VERSION, any SavedModel, can be served.")
@click.option("--sample", metavar="FILE", help="With --check or --format: the rows to run, an .npz file.")
@click.option("--inputs", metavar="NAMES", help="For a graph-mode script: NAME=TENSOR,...; default: the placeholders.")
@click.option("--outputs", metavar="NAMES", help="For a graph-mode script: NAME=TENSOR,...; default: the only one.")
@click.option("--meta-graph", metavar="FILE", help="For a graph-mode script: its graph, if it is not found.")
@startup_notes.hidden()  # before TensorFlow's import starts a thread, because forking with threads is not safe
def command(
    checkpoints: str | None,
    output: str | None,
    inputs: str | None,
    outputs: str | None,
    meta_graph: str | None,
    check: str | None,
    sample: str | None,
    format: str,
    opset: int | None,
    quantize: str | None,
    which: str,
    model: str | None,
    metric: str | None,
    mode: str,
    version: str | None,
    keep: int | None,
    weights: str | None,
    signature: tuple[str, ...],
    encoded_images: tuple[str, ...],
    model_name: str,
    no_verify: bool,
    no_warmup: bool,
) -> int:
    """Write OUTPUT/<version>/, a SavedModel, from the checkpoint directory CHECKPOINTS.

    \b
    keras-ddl export ckpt/ saved_model/
    keras-ddl export ckpt/ saved_model/ --which best --metric val_accuracy --version 3
    keras-ddl export ckpt/ saved_model/ --signature serving_default:probabilities,embedding
    keras-ddl export ckpt/ saved_model/ --encoded-images from_image:scale=1/255
    keras-ddl export --check saved_model/3
    keras-ddl export logs/model-300 saved_model --outputs scores=logits:0
    keras-ddl export ckpt/ onnx/ --format onnx

    Your code is not needed. The SavedModel has no operation of keras_ddl. A process without keras_ddl compares its
    outputs with those of the model in training.
    """
    other = format != "saved_model"
    if (check is None) == (output is None) or (check is not None and other) or (sample and not check and not other):
        raise ConfigError(
            "Give CHECKPOINTS and OUTPUT, or --check VERSION; --sample goes with --check and with --format. Received: "
            f"{[each for each in (checkpoints, output) if each is not None]}, --check {check}, --sample {sample}, "
            f"--format {format}."
        )
    if check is not None:
        return _check(check, sample)
    assert checkpoints is not None and output is not None
    signatures = parse_signatures(signature, encoded_images)
    source, wanted, number = Path(checkpoints), parse_which(which), parse_version(version)

    def export(folder: str | Path, version: int | str | None = None, keep: int | None = None) -> ExportResult:
        graph_options = [inputs, outputs, meta_graph]
        if graph_options != [None, None, None] or not source.is_dir() or _is_from_saver(source):
            if signatures:
                raise ConfigError(
                    "--signature and --encoded-images are for a directory that callbacks.Checkpoint has written. "
                    f"Received: {checkpoints!r}. For a graph-mode script, --outputs sets the outputs."
                )
            result = _graph_mode(checkpoints, folder, *graph_options, version=version, keep=keep)
            if result is not None:
                return result
        # Checked before TensorFlow is imported, which takes seconds.
        if not source.is_dir():
            raise CheckpointError(
                f"CHECKPOINTS must be a directory that callbacks.Checkpoint has written. Received: {checkpoints!r}, "
                "which is not a directory. Give the directory that the callback got."
            )
        from keras_ddl.export.graft import export_saved_model

        return export_saved_model(
            checkpoints,
            folder,
            which=wanted,
            model=model,
            version=version,
            metric=metric,
            mode=mode,
            validate="off" if no_verify else "process",
            warmup=other or not no_warmup,  # the proof of a conversion uses its rows
            model_name=model_name,
            weights=weights,
            keep=keep,
            signatures=signatures,
        )

    if other or opset is not None or quantize is not None:
        from keras_ddl.export.formats import export_format

        result = export_format(
            source if (source / "saved_model.pb").is_file() else export,
            output,
            format=format,
            opset=opset,
            quantize=quantize,
            sample=sample,
            version=number,
            keep=keep,
        )
    else:
        result = export(output, number, keep)
    click.echo(describe(result, model_name))
    return 0


def _is_from_saver(directory: Path) -> bool:
    """Returns whether a Saver wrote `directory`. In keras_ddl's, a CheckpointManager may have put a `checkpoint`."""
    return (directory / "checkpoint").is_file() and not list_bases(directory)


def _graph_mode(
    checkpoint: str,
    output: str | Path,
    inputs: str | None,
    outputs: str | None,
    meta_graph: str | None,
    *,
    version: int | str | None,
    keep: int | None,
) -> ExportResult | None:
    """Exports a Saver's checkpoint. Returns None if no Saver wrote it and no option requires one."""
    path = Path(checkpoint)
    has_file = path.with_name(path.name + ".index").exists() or _is_from_saver(path)
    if not has_file and (inputs, outputs, meta_graph) == (None, None, None):
        return None
    import_without_keras()
    import logging

    from keras_ddl.compat.tensorflow import tf
    from keras_ddl.export.graph_mode import export_graph

    tf.get_logger().setLevel(logging.ERROR)  # TensorFlow warns that graph mode is deprecated
    return export_graph(
        checkpoint,
        output,
        inputs=parse_tensors(inputs),
        outputs=parse_tensors(outputs),
        meta_graph=meta_graph,
        version=version,
        keep=keep,
    )


def parse_tensors(text: str | None) -> dict[str, str] | None:
    """Parses "scores=logits:0,x:0" to name -> tensor, by default under the operation's name. None for None."""
    if text is None:
        return None
    pairs = [each.strip().partition("=") for each in text.split(",") if each.strip()]
    tensors = {
        name if tensor else name.partition(":")[0].replace("/", "_"): tensor or name for name, _, tensor in pairs
    }
    if not tensors or not all(tensors) or len(tensors) < len(pairs):
        raise ConfigError(f"Tensors must be NAME=TENSOR,..., each name once. Received: {text!r}.")
    return tensors


def _check(version: str, sample: str | None) -> int:
    """Prints the report on a SavedModel, and writes it beside the model if possible.

    Returns: 1 if the model cannot be served."""
    import_without_keras()
    from keras_ddl.export.proof.check import check_saved_model

    report = check_saved_model(version, sample=sample)
    try:
        text, as_json = report.write()
        written = f"written: {text} and {as_json.name}"
    except OSError as error:
        written = f"not written: {error}"
    click.echo(f"{report.text()}  {written}")
    return 1 if report.problems else 0


def parse_which(text: str) -> str | int:
    """Returns "latest", "best" or a step. Raises: ConfigError: `text` is none of these."""
    if text in ("latest", "best"):
        return text
    if text.isdigit():
        return int(text)
    raise ConfigError(f"--which must be 'latest', 'best' or the number of a step. Received: {text!r}.")


def parse_version(text: str | None) -> int | str | None:
    """Returns None, "step" or a number above 0. Raises: ConfigError: `text` is none of these."""
    if text is None or text == "step":
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise ConfigError(f"--version must be a whole number above 0, or 'step'. Received: {text!r}.")


def describe(result: ExportResult, model_name: str) -> str:
    """Returns the message after an export: the output, its source, the time of each stage, and how to serve it."""
    source = [] if result.step is None else [f"step {result.step}"]
    source += [] if result.epoch is None else [f"epoch {result.epoch}"]
    source += [f"{name} {value:.4g}" for name, value in result.metrics.items()]
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.seconds.items())
    lines = [f"Wrote {result.path} (version {result.version}, {size_text(result.bytes)})"]
    lines += [f"  from: {', '.join(source)}"] if source else []
    lines += [f"  checked: {result.proof}", f"  time: {sum(result.seconds.values()):.2f} s ({stages})"]
    lines += [f"  removed: version {number}" for number in result.removed]
    lines += [f"  warning: {text}" for text in result.warnings]
    converted = sorted(result.path.glob("model.*"))
    if converted:
        return "\n".join(
            [*lines, f"It is {converted[0]}; keras_ddl_export.json beside it names its inputs and outputs."]
        )
    # As in the help of `keras-ddl serve`, names the model only if its name is not the default.
    name, variable = ("", "") if model_name == USUAL_MODEL_NAME else (f"{model_name}=", f" -e MODEL_NAME={model_name}")
    mount = f"{result.path.resolve().parent}:/models/{model_name}"
    lines += [
        "To try it, and to serve it, for example:",
        f"  keras-ddl serve {name}{result.path.parent}",
        f"  docker run --rm -p 8500:8500 -p 8501:8501 -v {mount}{variable} tensorflow/serving",
        f"  curl http://localhost:8501/v1/models/{model_name}",
    ]
    return "\n".join(lines)
