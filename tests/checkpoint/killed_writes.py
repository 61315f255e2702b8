"""Attempts of a job that saves, each in a process of its own that can be killed before any call that changes files.

A job restores, says what it found, and saves numbers, the last of which is given. After a kill it is started again, to
save one more: then old checkpoints and the killed attempt's unfinished files must be gone.
"""

import contextlib
import functools
import importlib
import json
import os
import re
import secrets
import shutil
import sys

import torch

import torchstrategy as ts
from torchstrategy.ps.service import ParameterService
from torchstrategy.ps.shard import Shard
from torchstrategy.ps.store import Key
from torchstrategy.ps.transport.secret import Secret
from torchstrategy.testing.faults import file_fault

NUM_SAVES = 3


class Value(torch.nn.Module):
    """A model that is a number, in two tensors that must agree."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(300_000))
        self.bias = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x + self.bias[0]

    def set(self, number):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(number)

    def get(self):
        (number,) = {value for parameter in self.parameters() for value in parameter.unique().tolist()}
        return int(number)


def files_of_a_checkpoint(folder, last, say):
    model = Value()
    checkpoint = ts.train.Checkpoint(model=model)
    path = ts.train.latest_checkpoint(folder)
    if path is not None:
        checkpoint.restore(path).assert_consumed()
    go_on(model, last, say, lambda: checkpoint.save(os.path.join(folder, "ckpt")))


def files_of_a_manager(folder, last, say, max_to_keep=2):
    model = Value()
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(model=model), folder, max_to_keep)
    manager.restore_or_initialize()
    go_on(model, last, say, manager.save)


def one_file(folder, last, say, name, how):
    model = Value()
    path = os.path.join(folder, name)
    if how == "write":
        checkpoint = ts.train.Checkpoint(model=model)
        if os.path.exists(path + ".pt"):
            checkpoint.read(path).assert_consumed()
        go_on(model, last, say, lambda: checkpoint.write(path))
    elif how == "model":
        whole = ts.Model(model)
        if os.path.exists(path):
            whole = ts.models.load_model(path, trust=True)
        go_on(whole.module, last, say, lambda: whole.save(path))
    else:
        whole = ts.Model(model)
        if os.path.exists(path) or os.path.exists(path + ".pt"):
            whole.load_weights(path)
        go_on(model, last, say, lambda: whole.save_weights(path))


def go_on(model, last, say, save):
    say("restored", model.get())
    for number in range(model.get() + 1, last + 1):
        model.set(number)
        save()
        say("saved", number)


class Count(ts.callbacks.Callback):
    """Says after each epoch, last, that all callbacks are done with it."""

    runs_last = True

    def __init__(self, say):
        super().__init__()
        self.say = say
        self.has_begun = False

    def on_epoch_begin(self, epoch, logs=None):
        if not self.has_begun:
            self.say("restored", epoch)
        self.has_begun = True

    def on_epoch_end(self, epoch, logs=None):
        self.say("saved", epoch + 1)


def weights(model):
    return [value.tolist() for value in model.state_dict().values()]


def fit(folder, last, say, delete, name, **options):
    torch.manual_seed(0)
    model = ts.Model(torch.nn.Linear(2, 1))
    model.compile("adam", "mse")
    callbacks = [ts.callbacks.BackupAndRestore(os.path.join(folder, "backup"), delete_checkpoint=delete)]
    if name is not None:
        callbacks.append(ts.callbacks.ModelCheckpoint(os.path.join(folder, "saved", name), **options))
    x = torch.arange(16.0).view(8, 2) / 16
    model.fit(x, x.sum(1, keepdim=True), epochs=last, batch_size=4, verbose=0, callbacks=[*callbacks, Count(say)])
    say("result", weights(model))
    if name is not None and options.get("save_weights_only", True):
        other = ts.Model(torch.nn.Linear(2, 1))
        other.load_weights(ts.train.latest_checkpoint(os.path.join(folder, "saved")))
        say("result", weights(other))


def estimator(folder, last, say):
    def model_fn(features, labels, mode):
        module = torch.nn.Linear(2, 1)
        module.weight.data.fill_(0.5)
        module.bias.data.zero_()
        optimizer = torch.optim.Adam(module.parameters())
        return ts.estimator.EstimatorSpec(mode, module=module, loss=torch.nn.functional.mse_loss, train_op=optimizer)

    config = ts.estimator.RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=2, log_step_count_steps=None)
    made = ts.estimator.Estimator(model_fn, os.path.join(folder, "model"), config)
    latest = made.latest_checkpoint()
    say("restored", 0 if latest is None else int(latest.rpartition("-")[2]))
    data = [(torch.full((2, 2), i / 4), torch.ones(2, 1)) for i in range(NUM_SAVES + 1)]
    for step in range(1 if latest is None else int(latest.rpartition("-")[2]) + 1, last + 1):
        made.train(lambda step=step: data[step - 1 : step], max_steps=step)
        say("saved", step)
    say("result", [made.get_variable_value(name).tolist() for name in ("weight", "bias")])


def parameter_server(folder, last, say):
    service = ParameterService()
    task, incarnation, secret = "/job:ps/task:0", secrets.token_hex(8), Secret("0123456789abcdef" * 4)
    shard = Shard(
        service, folder, task=task, incarnation=incarnation, secret=secret, every_s=1e6, replaced=lambda: os._exit(3)
    )
    shard.start()
    service.admit({"role": "coordinator", "incarnation": 1})
    held = service.held
    if not held.store.all_parts():
        for part, size in enumerate((300_000, 3)):
            held.store.create(Key(0, part), "v", torch.zeros(size), trainable=True)
    parts = [part for _, part in held.store.all_parts()]
    (found,) = {value for part in parts for value in part.parameter.unique().tolist()}
    say("restored", int(found))
    for number in range(int(found) + 1, last + 1):
        for part in parts:
            part.assign(torch.full_like(part.parameter.data, number))
        shard._save(held)
        say("saved", number)


JOBS = {
    "checkpoint": files_of_a_checkpoint,
    "manager": files_of_a_manager,
    "manager of one": functools.partial(files_of_a_manager, max_to_keep=1),
    "write": functools.partial(one_file, name="value", how="write"),
    "model": functools.partial(one_file, name="value.pt", how="model"),
    "weights": functools.partial(one_file, name="value.pt", how="weights"),
    "listed weights": functools.partial(one_file, name="value", how="weights"),
    "safetensors": functools.partial(one_file, name="value.safetensors", how="weights"),
    "backup": functools.partial(fit, delete=True, name=None),
    "kept backup": functools.partial(fit, delete=False, name=None),
    "model checkpoint": functools.partial(fit, delete=False, name="w-{epoch}"),
    "model checkpoint of models": functools.partial(fit, delete=False, name="m-{epoch}.pt", save_weights_only=False),
    "estimator": estimator,
    "parameter server": parameter_server,
}


def attempt(job, folder, last, kind=None, at=0):
    """Run an attempt in a process of its own; return what it said, its calls, and whether it ended by itself."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            with file_fault(kind, at, folder) as calls:
                JOBS[job](folder, last, lambda *words: os.write(writing, json.dumps(words).encode() + b"\n"))
            os.write(writing, json.dumps(["calls", calls, sorted(sys.modules)]).encode() + b"\n")
            status = 0
        except BaseException as error:  # noqa: BLE001 - the parent tells
            os.write(writing, json.dumps(["error", f"{type(error).__name__}: {error}"]).encode() + b"\n")
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = [json.loads(line) for line in pipe]
    return said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def files(folder):
    return sorted(
        re.sub(r"shard-\d+", "shard", os.path.relpath(os.path.join(place, name), folder))  # each start saves one more
        for place, _, names in os.walk(folder)
        for name in names
        if ".tfevents." not in name  # of each attempt one
    )


def prove(job, kind, folder, every=1):
    """Kill the job at each call in turn, and start it again; return how many calls there are."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    said, status = attempt(job, folder, NUM_SAVES)
    assert status == 0, said
    _, calls, modules = said.pop()
    for name in modules:  # here once, and not in each of the many processes
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    said, status = attempt(job, folder, NUM_SAVES + 1)
    assert status == 0, said
    expected, result = files(folder), [words for words in said if words[0] == "result"]
    for at in range(1, len(calls) + 1, every):
        shutil.rmtree(folder)
        os.makedirs(folder)
        said, status = attempt(job, folder, NUM_SAVES, kind, at)
        assert status == -9, (at, calls[at - 1], said)
        saved = max((words[1] for words in said if words[0] == "saved"), default=0)
        said, status = attempt(job, folder, NUM_SAVES + 1)
        where = f"{job}, {kind} before call {at} of {len(calls)} ({calls[at - 1]}), after save {saved}"
        assert status == 0, (where, said)
        (restored,) = [words[1] for words in said if words[0] == "restored"]
        is_done = job == "backup" and saved == NUM_SAVES  # its files are deleted in the end
        assert saved <= restored <= saved + 1 or is_done, (where, said)
        assert [words for words in said if words[0] == "result"] == result, (where, said)
        assert files(folder) == expected, (where, files(folder), expected)
    return calls


if __name__ == "__main__":
    torch.set_num_threads(1)  # which forked processes can use
    folder, kind, every, *jobs = sys.argv[1:]
    for job in jobs or JOBS:
        calls = prove(job, kind, os.path.join(folder, "job"), int(every))
        print(f"{job}: {len(calls)} calls, {sorted(set(calls))}", flush=True)
