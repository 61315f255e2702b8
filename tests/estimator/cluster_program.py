"""One task of an Estimator's cluster: the program that every task runs. Its argument is its settings, in JSON."""

import json
import os
import sys
import time

import fsspec
import torch

import torchstrategy as ts
from tests.estimator.lines import Line

SETTINGS = json.loads(sys.argv[1]) if __name__ == "__main__" else {}


def model_fn(features, labels, mode):
    module = Line()
    return ts.estimator.EstimatorSpec(
        mode,
        predictions=lambda outputs: {"y": outputs},
        loss=torch.nn.functional.mse_loss,
        train_op=torch.optim.SGD(module.parameters(), lr=0.01, momentum=SETTINGS.get("momentum", 0.0)),
        module=module,
    )


input_contexts = []


def input_fn(mode, input_context=None):
    is_known = input_context is not None
    input_contexts.append(
        [
            mode,
            input_context.num_input_pipelines if is_known else None,
            input_context.input_pipeline_id if is_known else None,
        ]
    )
    x = torch.arange(0.0, 8.0, 8 / SETTINGS.get("examples", 8))
    dataset = ts.data.Dataset.from_tensor_slices((x, 2 * x + 1))
    if SETTINGS.get("shard") and is_known:
        dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    if SETTINGS.get("shuffle"):
        dataset = dataset.shuffle(64, seed=3)
    if SETTINGS.get("repeat", True):
        dataset = dataset.repeat()
    return dataset.batch(2)


class NoteSteps(ts.estimator.SessionRunHook):
    """Writes each step's number and loss, and takes its time."""

    def __init__(self, path):
        self._path = path

    def before_run(self, run_context):
        return ts.estimator.SessionRunArgs({"step": "global_step", "loss": "loss"})

    def after_run(self, run_context, run_values):
        with open(self._path, "a") as file:
            print(json.dumps([run_values.results["step"], run_values.results["loss"]]), file=file)
        time.sleep(SETTINGS.get("step_s", 0.0))


def strategy():
    match SETTINGS.get("strategy"):
        case "multi_worker":
            return ts.MultiWorkerMirroredStrategy(devices=SETTINGS.get("devices"))
        case "parameter_server":
            return ts.compat.v1.distribute.experimental.ParameterServerStrategy()
        case "mirrored":
            return ts.MirroredStrategy(["cpu:0", "cpu:1"])
        case "central_storage":
            return ts.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
        case _:
            return None


def main():
    torch.set_num_threads(1)
    fsspec.config.conf.update(SETTINGS.get("stores", {}))
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "local", "index": 0})
    chosen = strategy()
    config = ts.estimator.RunConfig(
        SETTINGS["model_dir"],
        save_checkpoints_steps=SETTINGS.get("save_steps", 2),
        train_distribute=chosen,
        eval_distribute=chosen if SETTINGS.get("evaluates_alike") else None,
        experimental_max_worker_delay_secs=0,
    )
    estimator = ts.estimator.Estimator(model_fn, config=config)
    hooks = [NoteSteps(os.path.join(SETTINGS["folder"], f"{task['type']}{task['index']}.steps"))]
    if SETTINGS.get("keeps_position"):
        hooks.append(ts.estimator.CheckpointInputPipelineHook(estimator))
    if "stop_early_at" in SETTINGS:
        steps = os.path.join(SETTINGS["folder"], "chief0.steps")
        hooks.append(
            ts.estimator.experimental.make_early_stopping_hook(
                estimator,
                lambda: len(open(steps).readlines()) >= SETTINGS["stop_early_at"],  # noqa: SIM115
                run_every_secs=None,
                run_every_steps=1,
            )
        )
    receiver_fn = ts.estimator.export.build_raw_serving_input_receiver_fn(torch.zeros(2))
    exporters = [ts.estimator.FinalExporter("final", receiver_fn)] if SETTINGS.get("exports") else None
    result = ts.estimator.train_and_evaluate(
        estimator,
        ts.estimator.TrainSpec(input_fn, max_steps=SETTINGS.get("max_steps", 4), hooks=hooks),
        ts.estimator.EvalSpec(input_fn, steps=2, start_delay_secs=0, throttle_secs=0, exporters=exporters),
    )
    variables = {name: float(estimator.get_variable_value(name)) for name in ("w", "b", "global_step")}
    print(json.dumps({"result": result, "input_contexts": input_contexts, "variables": variables}))


if __name__ == "__main__":
    main()
