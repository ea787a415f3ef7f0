"""keras-ddl serve: serves SavedModels, for trials and small services."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from keras_ddl import packages
from keras_ddl.errors import ConfigError, DependencyError
from keras_ddl.serving.background_lines import BackgroundLines
from keras_ddl.serving.flags import FLAGS, Flag, Support

_MODULES = ("grpc", "grpc_health", "aiohttp", "prometheus_client", "orjson")


def _flags_of_tensorflow_serving(command: Callable[..., None]) -> Callable[..., None]:
    """Adds TensorFlow Serving's flags as hidden options, except `--port`, which is also an option of keras-ddl."""
    kinds: dict[type, Any] = {bool: click.BOOL, int: click.INT, float: click.FLOAT, str: click.STRING}
    for flag in reversed(FLAGS):
        if flag.name == "port":
            continue
        more: dict[str, Any] = {"flag_value": True, "is_flag": False} if flag.kind is bool else {}
        option = click.option(f"--{flag.name}", f"tfs_{flag.name}", type=kinds[flag.kind], hidden=True, **more)
        command = option(command)
    return command


@click.command("serve", short_help="Serve a SavedModel over gRPC and REST, for trials and small services.")
@click.argument("directories", nargs=-1, metavar="[NAME=]DIRECTORY...")
@click.option("--model-name", help="Name of a single DIRECTORY; default: model.", metavar="NAME")
@click.option(
    "--model-config-file", help="Models, versions and labels, in TensorFlow Serving's format.", metavar="FILE"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all addresses.")
@click.option("--port", "grpc_port", default=8500, show_default=True, help="gRPC port; 0 chooses one.")
@click.option("--rest-port", default=8501, show_default=True, help="REST port; 0 chooses one.")
@click.option(
    "--health-port",
    type=int,
    help="A port only for health probes, which requests cannot delay; 0 chooses one. Default: none.",
)
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, help="Worker threads of a model; default: one per core."
)
@click.option(
    "--queue", type=click.IntRange(min=0), default=1000, show_default=True, help="Requests that may wait for a model."
)
@click.option(
    "--max-message-mb",
    type=click.FloatRange(min=0.01),
    default=64.0,
    show_default=True,
    help="Largest request, also decompressed, and largest gRPC response.",
)
@click.option(
    "--max-memory-mb",
    type=click.FloatRange(min=1),
    default=1024.0,
    show_default=True,
    help="Memory limit of each model version's process, and of all requests in the server together.",
)
@click.option("--timeout", default=30.0, show_default=True, help="Time limit of a request in seconds.")
@click.option("--idle-seconds", default=75.0, show_default=True, help="Time limit of a connection without a request.")
@click.option("--poll-seconds", default=1.0, show_default=True, help="How often to look for new versions.")
@click.option(
    "--drain-seconds", default=30.0, show_default=True, help="Time at shutdown for running requests to finish."
)
@click.option("--allow-reload-config", is_flag=True, help="Let clients change the list of models.")
@click.option(
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="A Python module whose import registers operations that a model needs, such as tensorflow_text.",
)
@click.option("--access-log", help="A JSON line for each request, to this file; - for stdout.", metavar="FILE")
@_flags_of_tensorflow_serving
def command(directories: tuple[str, ...], **arguments: Any) -> None:
    """Serve the newest version in each DIRECTORY of `keras-ddl export`, and each newer version that appears.

    \b
    keras-ddl serve saved_model
    keras-ddl serve digits=saved_model translate=/models/translate --port 0
    keras-ddl serve --model-config-file models.config

    The server has TensorFlow Serving's interfaces, gRPC on 8500 and REST on 8501, and also takes the flags of
    tensorflow_model_server. It is for trying a model and for small services. To serve the same directory with
    TensorFlow Serving itself:

    \b
    docker run --rm -p 8500:8500 -p 8501:8501 -v $PWD/saved_model:/models/model tensorflow/serving
    """
    options = _with_flags(arguments)
    if arguments["tfs_model_base_path"] is not None:
        directories = (*directories, arguments["tfs_model_base_path"])
    models = _models(directories, options["model_name"], options["model_config_file"])
    if missing := packages.missing(_MODULES):
        raise DependencyError(
            f"keras-ddl serve needs the extra 'serving'. Received: an environment without {', '.join(missing)}. "
            f"Install it: {packages.pip_install('[serving]')}"
        )
    for module in arguments["modules"]:
        _check_module(module)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # clients that do not speak gRPC must not fill the log
    from keras_ddl.serving import model_config
    from keras_ddl.serving.server import Server
    from keras_ddl.serving.settings import server_options

    config_file = options["model_config_file"]
    if config_file is not None:
        models = model_config.read_file(config_file)
    access_log = options.pop("access_log")
    log = None if access_log is None else _open_log(access_log)
    settings = server_options(options, log)
    names = ", ".join(f"{each.name} ({each.base_path})" for each in models)

    def started(grpc_port: int, rest_port: int, health_port: int | None) -> None:
        where = f"gRPC on {settings.host}:{grpc_port}, REST on http://{settings.host}:{rest_port}"
        if health_port is not None:
            where += f", health on http://{settings.host}:{health_port}"
        click.echo(f"Serving {names}: {where}")
        if not _is_loopback(settings.host):
            click.echo(
                f"keras-ddl serve: {settings.host} can be reached from other machines. This server is for trying a "
                "model; TensorFlow Serving is the server for production.",
                err=True,
            )
        sys.stdout.flush()

    stderr = BackgroundLines(sys.stderr.fileno())
    _log_to(stderr, options["without_effect"])
    try:
        all_done = Server(models, settings).run(started)
    finally:
        for each in (log, stderr):
            if each is not None:
                each.close()
    if not all_done:
        drain = settings.drain_seconds
        click.echo(f"keras-ddl serve: requests that took longer than {drain:g} s are abandoned.", err=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_flags(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns our options, with TensorFlow Serving's flags applied. Raises: ConfigError: a flag is refused."""
    options = {name: value for name, value in arguments.items() if not name.startswith("tfs_")}
    options["without_effect"] = []
    for flag in FLAGS:
        value = arguments.get(f"tfs_{flag.name}")
        if value is None:
            continue
        if flag.support is Support.REFUSED and value is not False:
            raise ConfigError(f"keras-ddl serve does not support --{flag.name}: {flag.note}. Leave it out.")
        if flag.support is Support.NO_EFFECT:
            options["without_effect"].append(flag)
        name = flag.option or f"tfs_{flag.name}"
        options[name] = value * flag.scale if flag.scale != 1.0 else value
    return options


def _check_module(module: str) -> None:
    """Raises: ConfigError: the module is not installed. The process that starts the models imports it later."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise ConfigError(f"--import must name a Python module that is installed. Received: {module!r}.")


def _open_log(path: str) -> BackgroundLines:
    """Opens the access log; "-" is stdout. Raises: ConfigError: it cannot be opened."""
    try:
        # O_NONBLOCK: does not wait for the reader of a FIFO.
        descriptor = 1 if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        if path != "-":
            os.set_blocking(descriptor, True)
    except OSError as error:
        raise ConfigError(
            f"--access-log must be a file that can be written to. Received: {path!r} ({error.strerror}). Name a file "
            "in a directory that exists and is yours."
        ) from None

    def lost(why: str) -> None:
        logging.getLogger("keras_ddl.serving").warning(
            "the access log %s is incomplete: %s. Requests are still answered.", path, why
        )

    return BackgroundLines(descriptor, lost)


def _log_to(stream: BackgroundLines, without_effect: Sequence[Flag]) -> None:
    """Sends the server's log to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("keras-ddl serve: %(message)s"))
    logger = logging.getLogger("keras_ddl.serving")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    for flag in without_effect:
        logger.info("--%s has no effect here: %s.", flag.name, flag.note)


def _models(directories: tuple[str, ...], model_name: str | None, config_file: str | None) -> list:
    """Returns the models that the command line names. Raises: ConfigError: no models, or both ways are used."""
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
                "If training will write it later, create it: the server waits for the first version."
            )
        if (Path(path) / "saved_model.pb").exists():
            whole = Path(path).resolve()
            remedy = f"Move its files to {str(whole / '1')!r}, and give {path!r}."
            if whole.name.isdecimal():
                remedy = f"Give its parent directory: {str(whole.parent)!r}."
            raise ConfigError(
                f"DIRECTORY must hold versions, such as saved_model/1. Received: {path!r}, which is itself a "
                f"SavedModel. {remedy}"
            )
        models.append(ModelConfig(name, Path(path)))
    names = [each.name for each in models]
    if len(set(names)) < len(names):
        raise ConfigError(f"Each model needs a unique name. Received: {names}. Give NAME=DIRECTORY.")
    return models
