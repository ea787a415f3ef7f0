"""keras-ddl serve: a server for trying a SavedModel."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path

import click

from keras_ddl.compat.tensorflow_packages import import_without_keras
from keras_ddl.errors import ConfigError, DependencyError

_MODULES = ("tensorflow_serving", "grpc", "grpc_health", "aiohttp", "prometheus_client")


@click.command("serve", short_help="Serve a SavedModel over gRPC and REST, for trials.")
@click.argument("directories", nargs=-1, metavar="[NAME=]DIRECTORY...")
@click.option("--model-name", help="Name of a single DIRECTORY; default: model.", metavar="NAME")
@click.option(
    "--model-config-file", help="Models, versions and labels, in TensorFlow Serving's format.", metavar="FILE"
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--port", "grpc_port", default=8500, show_default=True, help="gRPC port; 0 chooses one.")
@click.option("--rest-port", default=8501, show_default=True, help="REST port; 0 chooses one.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Worker threads; default: one per core.")
@click.option("--queue", type=click.IntRange(min=0), default=1000, show_default=True, help="Requests that may wait.")
@click.option(
    "--max-batch-size", type=click.IntRange(min=1), help="Batch up to this many rows together.", metavar="ROWS"
)
@click.option(
    "--batch-timeout-ms", default=1.0, show_default=True, help="How long the first row of a batch waits for others."
)
@click.option(
    "--max-message-mb", default=64.0, show_default=True, help="Maximum size of a request, and of a gRPC response."
)
@click.option("--timeout", default=30.0, show_default=True, help="Time limit of a REST request in seconds.")
@click.option("--poll-seconds", default=1.0, show_default=True, help="How often to look for new versions.")
@click.option(
    "--drain-seconds", default=30.0, show_default=True, help="Time at shutdown for running requests to finish."
)
@click.option("--access-log", help="A JSON line for each request, to this file; - for stdout.", metavar="FILE")
def command(
    directories: tuple[str, ...],
    model_name: str | None,
    model_config_file: str | None,
    host: str,
    grpc_port: int,
    rest_port: int,
    threads: int,
    queue: int,
    max_batch_size: int | None,
    batch_timeout_ms: float,
    max_message_mb: float,
    timeout: float,
    poll_seconds: float,
    drain_seconds: float,
    access_log: str | None,
) -> None:
    """Serve the newest version in each DIRECTORY, as `keras-ddl export` writes them, and each newer one that appears.

    \b
    keras-ddl serve saved_model
    keras-ddl serve digits=saved_model translate=/models/translate --port 0
    keras-ddl serve --model-config-file models.config

    It speaks TensorFlow Serving's interfaces, gRPC on 8500 and REST on 8501, and is meant to try a model with on a
    laptop and in tests. In production serve the same directory with TensorFlow Serving itself:

    \b
    docker run --rm -p 8500:8500 -p 8501:8501 -v $PWD/saved_model:/models/model tensorflow/serving
    """
    models = _models(directories, model_name, model_config_file)
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"keras-ddl serve needs the extra 'serving': pip install 'keras_ddl[serving]'. Not found: {missing}. "
            "With tensorflow-cpu: pip install --no-deps tensorflow-serving-api, because it requires the full "
            "tensorflow."
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import_without_keras()
    from keras_ddl.serving import model_config
    from keras_ddl.serving.batching import Batching
    from keras_ddl.serving.server import Options, Server

    if model_config_file is not None:
        models = model_config.read_file(model_config_file)
    _log_to_stderr()
    options = Options(
        host=host,
        grpc_port=grpc_port,
        rest_port=rest_port,
        threads=threads,
        queue=queue,
        batching=None if max_batch_size is None else Batching(max_batch_size, batch_timeout_ms / 1e3),
        message_bytes=int(max_message_mb * 2**20),
        timeout=timeout,
        poll_seconds=poll_seconds,
        drain_seconds=drain_seconds,
        access_log=None if access_log is None else click.open_file(access_log, "a"),
    )
    names = ", ".join(f"{each.name} ({each.base_path})" for each in models)

    def started(grpc_port: int, rest_port: int) -> None:
        click.echo(f"Serving {names}: gRPC on {host}:{grpc_port}, REST on http://{host}:{rest_port}")
        sys.stdout.flush()

    if not Server(models, options).run(started):
        click.echo(f"keras-ddl serve: requests that took longer than {drain_seconds:g} s are abandoned.", err=True)
        sys.stderr.flush()
        os._exit(0)  # their threads would keep the process


def _log_to_stderr() -> None:
    """Shows what this server says; of TensorFlow errors only, as it remarks on every model that it loads."""
    from keras_ddl.compat.tensorflow import tf

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("keras-ddl serve: %(message)s"))
    logger = logging.getLogger("keras_ddl.serving")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    tf.get_logger().setLevel(logging.ERROR)


def _models(directories: tuple[str, ...], model_name: str | None, config_file: str | None) -> list:
    """Returns the models that the command line names. Raises: ConfigError: none, or by both ways."""
    from keras_ddl.serving.model_config import ModelConfig

    if bool(directories) == (config_file is not None):
        raise ConfigError(
            f"Give directories of models or --model-config-file. Received: {list(directories)} and {config_file!r}."
        )
    if model_name is not None and len(directories) != 1:
        raise ConfigError(
            f"--model-name is for one DIRECTORY. Received: {list(directories)}. Give NAME=DIRECTORY for each."
        )
    models = []
    for text in directories:
        name, separator, path = text.partition("=")
        if not separator or Path(text).exists():
            name, path = model_name or "model", text
        if not Path(path).is_dir():
            raise ConfigError(
                f"DIRECTORY must hold versions, such as saved_model/1. Received: {path!r}, which is not a directory. "
                "If training has yet to write it, create it: the server waits for the first version."
            )
        if (Path(path) / "saved_model.pb").exists():
            raise ConfigError(
                f"DIRECTORY must hold versions, such as saved_model/1. Received: {path!r}, which is itself a "
                f"SavedModel. "
                f"Give its parent directory: {str(Path(path).resolve().parent)!r}."
            )
        models.append(ModelConfig(name, Path(path)))
    names = [each.name for each in models]
    if len(set(names)) < len(names):
        raise ConfigError(f"Each model needs a name of its own. Received: {names}. Give NAME=DIRECTORY.")
    return models
