"""One task of a cluster that trains a wide and deep classifier on strings. Its argument is its settings, in JSON."""

import json
import sys

import torch

import torchstrategy as ts

SETTINGS = json.loads(sys.argv[1]) if __name__ == "__main__" else {}


def input_fn(mode, input_context=None):
    colors = ["red", "green", "blue", "red", "green", "red", "blue", "green"]
    batches = []
    for first in range(0, 8, 2):
        chosen = colors[first : first + 2]
        features = {"color": chosen, "x": torch.arange(first, first + 2) / 8}
        batches.append((features, ["stop" if color == "red" else "go" for color in chosen]))
    if input_context is not None and input_context.num_input_pipelines > 1:
        batches = batches[input_context.input_pipeline_id :: input_context.num_input_pipelines]
    return batches * 50


def strategy():
    match SETTINGS.get("strategy"):
        case "multi_worker":
            return ts.MultiWorkerMirroredStrategy()
        case "parameter_server":
            return ts.compat.v1.distribute.experimental.ParameterServerStrategy()
        case "mirrored":
            return ts.MirroredStrategy(["cpu:0", "cpu:1"])


def make_estimator():
    color = ts.feature_column.categorical_column_with_vocabulary_list("color", ["red", "green", "blue"])
    x = ts.feature_column.numeric_column("x")
    return ts.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=[color],
        linear_optimizer="Ftrl",
        dnn_feature_columns=[x, ts.feature_column.embedding_column(color, 2)],
        dnn_hidden_units=[4],
        dnn_optimizer="SGD",
        label_vocabulary=["stop", "go"],
        config=ts.estimator.RunConfig(
            SETTINGS["model_dir"],
            tf_random_seed=1,
            train_distribute=strategy(),
            experimental_max_worker_delay_secs=0,
        ),
    )


def main():
    torch.set_num_threads(1)
    estimator = make_estimator()
    ts.estimator.train_and_evaluate(
        estimator,
        ts.estimator.TrainSpec(input_fn, max_steps=SETTINGS["max_steps"]),
        ts.estimator.EvalSpec(input_fn, steps=4, start_delay_secs=0, throttle_secs=0),
    )
    names = estimator.get_variable_names()
    values = {name: estimator.get_variable_value(name).tolist() for name in names if "optimizer" not in name}
    print(json.dumps({"variables": values, "evaluation": estimator.evaluate(input_fn, steps=4)}))


if __name__ == "__main__":
    main()
