"""keras-ddl predict: sends rows to a model server and shows the outputs."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from keras_ddl import packages, parts
from keras_ddl.compat.tensorflow_packages import import_without_keras
from keras_ddl.errors import ConfigError, DependencyError, ServingError
from keras_ddl.files import foreign
from keras_ddl.launch.output import startup_notes

_NAMED_AS_IN_NUMPY = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
_DTYPES = {"DT_HALF": "float16", "DT_FLOAT": "float32", "DT_DOUBLE": "float64"}
_DTYPES |= {f"DT_{name.upper()}": name for name in _NAMED_AS_IN_NUMPY}


@click.command("predict", short_help="Query a model server.")
@click.argument("url")
@click.argument("rows", metavar="ROWS", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--model", default="model", show_default=True, help="The model's name on the server.", metavar="NAME")
@click.option("--version", type=click.IntRange(min=1), help="Default: the newest.", metavar="N")
@click.option("--signature", default="serving_default", show_default=True, metavar="NAME")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds.")
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write the outputs here, as .npz or .json.")
def command(
    url: str, rows: str, model: str, version: int | None, signature: str, timeout: float, output: str | None
) -> None:
    """Send ROWS to the model server at URL and show the outputs.

    \b
    keras-ddl predict http://localhost:8501 rows.npz
    keras-ddl predict grpc://localhost:8500 rows.json --model digits --version 3 -o answers.npz
    echo '{"x": [[1, 2, 3]]}' | keras-ddl predict http://localhost:8501 -

    ROWS is an .npz file with an array for each input, under its name, or JSON: an object of such arrays, or
    {"instances": [...]} with the rows, as for curl. It works with `keras-ddl serve` and with TensorFlow Serving.
    """
    import numpy as np

    scheme, separator, address = url.rstrip("/").partition("://")
    ask = {"http": _by_rest, "https": _by_rest, "grpc": _by_grpc}.get(scheme if separator else "")
    if ask is None:
        raise ConfigError(f"URL must begin with http://, https:// or grpc://. Received: {url!r}.")
    if output is not None and Path(output).suffix not in (".npz", ".json"):
        raise ConfigError(f"--output must end in .npz or .json. Received: {output!r}.")
    inputs = _read(rows)
    outputs = ask(f"{scheme}://{address}" if ask is _by_rest else address, model, version, signature, inputs, timeout)
    outputs = {name: _readable(array) for name, array in outputs.items()}
    if output is not None and Path(output).suffix == ".npz":
        parts.need("export")  # strings in .npz
        from keras_ddl.export.inference.replay import save

        save(output, {name: _storable(name, array) for name, array in outputs.items()})
    elif output is not None:
        Path(output).write_text(json.dumps({name: _plain(array) for name, array in outputs.items()}))
    for name, array in outputs.items():
        click.echo(f"{name} {array.dtype} {list(array.shape)}")
        if output is None:
            click.echo(np.array2string(array, threshold=200, precision=6))


def _read(rows: str) -> dict[str, Any]:
    import numpy as np

    if rows.endswith(".npz"):
        with np.load(rows) as file:
            try:
                return dict(file)
            except ValueError:
                raise ConfigError(
                    f"ROWS must have plain arrays. Received: {rows!r} with Python objects. Convert them to numbers or "
                    'strings; write bytes, as of images, in JSON: {"image_bytes": [{"b64": "..."}]}.'
                ) from None
    with click.open_file(rows, encoding="utf-8") as file:  # JSON is UTF-8, with any system encoding
        try:
            inputs = foreign.parse_json(file.read())
        except ValueError as error:
            raise ConfigError(f"ROWS must be an .npz file, or JSON. Received: {rows!r}: {error}.") from None
    if not isinstance(inputs, dict):
        raise ConfigError(f"ROWS as JSON must be an object of inputs by name. Received: {type(inputs).__name__}.")
    return inputs


def _columns(rows: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the inputs by name. `rows`: the same, or {"instances": [...]}. `names`: names of the model's inputs."""
    names, instances = list(names), rows.get("instances")
    if "instances" in names or len(rows) != 1 or not isinstance(instances, list):
        return rows
    if all(isinstance(row, dict) and row.keys() == set(names) for row in instances):
        return {name: [row[name] for row in instances] for name in names}
    if len(names) == 1:
        return {names[0]: instances}
    raise ConfigError(
        f'Each of the "instances" in ROWS must be an object with the inputs of the model ({", ".join(names)}). '
        f"Received: {json.dumps(instances[0])[:100]}."
    )


def _by_rest(
    url: str, model: str, version: int | None, signature: str, inputs: dict[str, Any], timeout: float
) -> dict[str, Any]:
    """Asks a server for predictions over REST. Raises: ServingError, as `_by_grpc` does."""
    import numpy as np

    path = f"{url}/v1/models/{model}" + (f"/versions/{version}" if version else "")
    try:
        with urllib.request.urlopen(f"{path}/metadata", timeout=timeout) as answer:
            signatures = json.load(answer)["metadata"]["signature_def"]["signature_def"]
        # If the signature does not exist, the server refuses the request below.
        inputs = _columns(inputs, signatures.get(signature, {}).get("inputs", ()))
        values = {name: _plain(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
        body = json.dumps({"signature_name": signature, "inputs": values}).encode()
        request = urllib.request.Request(f"{path}:predict", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            outputs = json.load(answer)["outputs"]
    except urllib.error.HTTPError as error:
        why = f"{error.code}: {_message(error.read())}"
        is_missing = error.code in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.SERVICE_UNAVAILABLE)
        raise (_without_model(url, model, why) if is_missing else _refused(url, why)) from None
    except (urllib.error.URLError, TimeoutError) as error:
        raise _none_there(url, str(getattr(error, "reason", error))) from None
    except (http.client.HTTPException, json.JSONDecodeError, UnicodeError, LookupError, ConnectionError) as error:
        why = f"no answer in HTTP with JSON: {type(error).__name__}. For a gRPC port use grpc://"
        raise _none_there(url, why) from None
    # JSON has no dtypes, and no name for a single output, so both come from the metadata.
    dtypes = {name: each["dtype"] for name, each in signatures[signature]["outputs"].items()}
    if len(dtypes) == 1:
        outputs = {next(iter(dtypes)): outputs}
    return {name: np.asarray(value, _DTYPES.get(dtypes[name])) for name, value in outputs.items()}


def _by_grpc(
    address: str, model: str, version: int | None, signature: str, inputs: dict[str, Any], timeout: float
) -> dict[str, Any]:
    """Asks a server for predictions over gRPC, and tells apart a missing server, a missing model and a refusal.

    Raises: ServingError. DependencyError: grpcio is not installed. ConfigError: rows have other dtypes than the model.
    """
    if packages.missing(["grpc"]):
        raise DependencyError(
            "URLs with grpc:// need grpcio. Received: an environment without it. Use http://, or install it: "
            f"{packages.pip_install('[serving]')}"
        )
    with startup_notes.hidden():
        import_without_keras()
    import grpc
    import numpy as np

    from keras_ddl.compat.tensorflow import tf
    from keras_ddl.serving.prediction.tensors import cast
    from keras_ddl.serving.protocol.messages import message

    with grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        is_there = False

        def watch(state: Any) -> None:
            nonlocal is_there
            is_there |= state is grpc.ChannelConnectivity.READY

        channel.subscribe(watch)

        def call(method: str, request: Any) -> Any:
            reply = message(f"{method}Response").FromString
            path = f"/tensorflow.serving.PredictionService/{method}"
            return channel.unary_unary(path, type(request).SerializeToString, reply)(request, timeout=timeout)

        try:
            # Casts, because JSON and NumPy have other dtypes than the model's inputs.
            metadata = message("GetModelMetadataRequest")(metadata_field=["signature_def"])
            request = message("PredictRequest")()
            for each in (metadata, request):
                each.model_spec.name = model
                if version:
                    each.model_spec.version.value = version
            signatures = message("SignatureDefMap")()
            call("GetModelMetadata", metadata).metadata["signature_def"].Unpack(signatures)
            known = signatures.signature_def[signature].inputs
            request.model_spec.signature_name = signature
            for name, value in _columns(inputs, known).items():
                value = _without_base64(value)
                dtype = tf.as_dtype(known[name].dtype) if name in known else None
                if dtype not in (None, tf.string):
                    try:
                        value = cast(np.asarray(value), dtype)
                    except (ValueError, TypeError, OverflowError) as error:
                        raise ConfigError(f"ROWS: input {name!r} takes {dtype.name}: {error}.") from None
                request.inputs[name].CopyFrom(tf.make_tensor_proto(value, dtype))
            answer = call("Predict", request)
        except grpc.RpcError as error:
            why = f"{error.code().name}: {str(error.details()).rstrip('.')}"
            # The answer may arrive before the channel's state.
            is_there |= error.code() is grpc.StatusCode.INVALID_ARGUMENT
            if error.code() is grpc.StatusCode.NOT_FOUND or (is_there and error.code() is grpc.StatusCode.UNAVAILABLE):
                raise _without_model(address, model, why) from None
            if not is_there:
                raise _none_there(address, why) from None
            raise _refused(address, why) from None
    return {name: tf.make_ndarray(proto) for name, proto in answer.outputs.items()}


def _plain(array: Any) -> Any:
    """Returns the array as lists, for JSON."""
    if array.dtype.kind not in "OSU":
        return array.tolist()

    def text(value: Any) -> Any:
        return [text(each) for each in value] if isinstance(value, list) else _text(value)

    return text(array.tolist())


def _text(value: Any) -> Any:
    """Returns a string; for bytes that are not UTF-8, the JSON object {"b64": ...}."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def _without_base64(value: Any) -> Any:
    """Returns JSON with bytes instead of {"b64": ...} objects."""
    if isinstance(value, list):
        return [_without_base64(each) for each in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) and set(value) == {"b64"} else value


def _readable(array: Any) -> Any:
    """Converts bytes (from gRPC) and base64 (from REST) to an array of strings.

    Bytes that are not UTF-8 stay bytes, and so do strings that end with zeros, which NumPy's strings would drop.
    """
    import numpy as np

    if array.dtype.kind != "O":
        return array
    values = [_without_base64(each) for each in array.flat]
    values = [each.encode() if isinstance(each, str) else each for each in values]
    if not all(isinstance(each, bytes) for each in values):
        return array
    with contextlib.suppress(UnicodeDecodeError):
        if not any(each.endswith(b"\0") for each in values):
            return np.array([each.decode() for each in values], str).reshape(array.shape)
    result = np.empty(array.shape, object)
    result.reshape(-1)[:] = values
    return result


def _storable(name: str, array: Any) -> Any:
    """Returns an array that .npz stores without pickle."""
    if array.dtype.kind == "O" and any(each.endswith(b"\0") for each in array.flat):
        raise ConfigError(
            f".npz drops zeros at the end of bytes. Received: output {name!r} with such zeros. Write .json."
        )
    return array.astype("S") if array.dtype.kind == "O" else array


def _none_there(where: str, why: str) -> ServingError:
    return ServingError(
        f"keras-ddl predict needs a running model server. Received: no answer from {where} ({why}). Start one, for "
        "example `keras-ddl serve saved_model`, and give the address that it prints."
    )


def _without_model(where: str, model: str, why: str) -> ServingError:
    return ServingError(
        f"The server must have loaded the model before it can answer. Received from {where}: {why}. The server has no "
        f"model {model!r}, or is still loading it. Try again in a few seconds, or look at the output of the server."
    )


def _refused(where: str, why: str) -> ServingError:
    return ServingError(f"The server must accept the request. Received from {where}: {why}")


def _message(body: bytes) -> str:
    """Returns the server's message in the body of an error: in JSON under "error", else the text."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(body)["error"]).rstrip(".")
    return body.decode(errors="replace").strip()
