"""Logs a training to MLflow with its Keras callback, parameters, a metric and the model."""

import keras
import mlflow
import numpy as np

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 8))
y = x.sum(axis=1, keepdims=True)

mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("sums")
strategy = keras_ddl.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])

with mlflow.start_run(run_name="tanh") as run:
    mlflow.log_params({"units": 8, "batch_size": 16})
    history = model.fit(
        x, y, batch_size=16, epochs=3, verbose=2, validation_split=0.2, callbacks=[mlflow.keras.MlflowCallback()]
    )
    mlflow.log_metric("rows", len(x))
    signature = mlflow.models.infer_signature(x[:3], model.predict(x[:3], verbose=0))
    mlflow.keras.log_model(model, name="model", signature=signature, pip_requirements=["keras"])
print("logged", mlflow.get_run(run.info.run_id).data.metrics["rows"], "rows")
