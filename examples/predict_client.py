"""Sends requests to a model server, TensorFlow Serving or `keras-ddl serve`, over gRPC or REST.

    python predict_client.py rows.npz                       # REST, localhost:8501, model "model"
    python predict_client.py rows.npz --grpc localhost:8500 --model digits --version 3

rows.npz contains an array for each input of the model, under its name. Copy `predict_by_grpc` or `predict_by_rest` into
your client. The first needs tensorflow-serving-api, the second only the standard library and NumPy.
"""

import argparse
import json
import urllib.error
import urllib.request

import numpy as np


def predict_by_rest(base_url, model, arrays, version=None, timeout=10.0):
    """Returns output name -> array. Raises: RuntimeError: the error of the server."""
    path = f"{base_url}/v1/models/{model}" + (f"/versions/{version}" if version else "") + ":predict"
    body = json.dumps({"inputs": {name: array.tolist() for name, array in arrays.items()}}).encode()
    request = urllib.request.Request(path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            outputs = json.load(answer)["outputs"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {json.load(error)['error']}") from None
    if not isinstance(outputs, dict):  # for a model with one output, the JSON does not contain its name
        outputs = {"output": outputs}
    return {name: np.asarray(value) for name, value in outputs.items()}


def predict_by_grpc(address, model, arrays, version=None, timeout=10.0):
    """Returns output name -> array. Raises: RuntimeError: the error of the server."""
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    if version:
        request.model_spec.version.value = version
    for name, array in arrays.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    # A program that sends many requests should keep the channel, because connecting takes longer than an answer.
    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        try:
            answer = stub.Predict(request, timeout=timeout)
        except grpc.RpcError as error:
            raise RuntimeError(f"{error.code().name}: {error.details()}") from None
    return {name: tf.make_ndarray(proto) for name, proto in answer.outputs.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="an .npz file")
    parser.add_argument("--model", default="model")
    parser.add_argument("--version", type=int)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--rest", default="http://localhost:8501", metavar="URL")
    where.add_argument("--grpc", metavar="HOST:PORT")
    arguments = parser.parse_args()
    with np.load(arguments.rows) as file:
        arrays = dict(file)
    if arguments.grpc:
        outputs = predict_by_grpc(arguments.grpc, arguments.model, arrays, arguments.version)
    else:
        outputs = predict_by_rest(arguments.rest, arguments.model, arrays, arguments.version)
    for name, array in outputs.items():
        print(f"{name} {array.dtype} {list(array.shape)}\n{array}")


if __name__ == "__main__":
    main()
