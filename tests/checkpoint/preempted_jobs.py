"""Jobs in processes of their own that get SIGTERM at random moments, and are started again until they are done.

Each says which optimizer steps it makes: every step must be made once, and the end be that of an unbroken run.
"""

import json
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch

import torchstrategy as ts
from torchstrategy.experimental import PreemptionCheckpointHandler, TerminationConfig

EPOCHS, STEPS = 3, 6


class Slow(torch.utils.data.Dataset):
    """Examples that take a while, so that a signal may come while they are read."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.x[index], self.x[index].sum(0, keepdim=True)


def make_data():
    return Slow(torch.arange(4.0 * STEPS * 2, dtype=torch.float64).view(-1, 2) / 48)


def fit(folder, say, number):
    torch.manual_seed(0)
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = ts.Model(torch.nn.Linear(2, 1).double())
    model.compile(torch.optim.Adam(model.parameters()), "mse", metrics=["mae"])
    made = ts.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: say("step", model.iterations),
        on_test_batch_end=lambda batch, logs: say("test", batch),
        on_train_end=lambda logs: say("ending"),
    )
    begun = ts.callbacks.LambdaCallback(on_train_begin=lambda logs: say("begun"))
    begun.runs_last = True  # as BackupAndRestore, which is given before
    backup = ts.callbacks.BackupAndRestore(folder, save_before_preemption=True, delete_checkpoint=False)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=4)
    check = torch.utils.data.DataLoader(make_data(), batch_size=4)
    history = model.fit(loader, validation_data=check, epochs=EPOCHS, callbacks=[made, backup, begun], verbose=0)
    say("result", model.module.weight.tolist(), history.history)


def loop(folder, say, number):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1).double()
        optimizer = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(make_data(), batch_size=4)
    dataset = strategy.experimental_distribute_dataset(loader)
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, dataset=dataset)
    config = TerminationConfig(grace_period=0.02 * (number % 3), deadline=20)

    def step(batch):
        optimizer.zero_grad()
        ((model(batch[0]) - batch[1]).square().sum() / 4).backward()
        optimizer.step()

    def told_step(batch):
        strategy.run(step, args=(batch,))
        say("step", handler.total_run_calls + 1)

    with PreemptionCheckpointHandler(None, checkpoint, folder, config) as handler:
        say("begun")
        while handler.total_run_calls < EPOCHS * STEPS:
            for batch in dataset:
                handler.run(told_step, batch)
        say("ending")
    say("result", model.weight.tolist())


JOBS = {"fit": fit, "loop": loop}


def attempt(job, folder, number, after=None, sent=signal.SIGTERM):
    """Run an attempt, which gets a signal some seconds after it has begun; return what it said, its status and time.

    It says "begun" when it answers signals and "ending" just before it no longer does.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            JOBS[job](folder, lambda *words: os.write(writing, json.dumps(words).encode() + b"\n"), number)
            status = 0
        except SystemExit as error:
            status = error.code
        except BaseException as error:  # noqa: BLE001 - the parent tells
            os.write(writing, json.dumps(["error", f"{type(error).__name__}: {error}"]).encode() + b"\n")
        finally:
            os._exit(status)
    os.close(writing)
    said, begin = [], time.monotonic()
    with os.fdopen(reading) as pipe:
        for line in pipe:
            said.append(json.loads(line))
            if said[-1] == ["begun"]:
                begin = time.monotonic()
                if after is not None:
                    time.sleep(after)
                    os.kill(pid, sent)  # a child that has ended waits for its parent to ask, so its number is its own
    return said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - begin


def steps_of(said):
    """Return the steps that were made, as far as that was said."""
    return [words[1] for words in said if words[0] == "step"]


def prove(job, folder, moments, seed):
    """Send a signal at random moments; return how many attempts were ended by one."""
    draw = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    said, status, lasts = attempt(job, folder, 0)
    assert status == 0, said
    unbroken = said[-1]
    assert steps_of(said) == list(range(1, EPOCHS * STEPS + 1))
    ended = 0
    for moment in range(moments):
        shutil.rmtree(folder, ignore_errors=True)
        made, attempts = [], 0
        while True:
            after = draw.uniform(0, 0.9 * lasts) if attempts < 2 else None
            sent = draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
            said, status, _ = attempt(job, folder, moment, after, sent)
            where = (job, seed, moment, attempts, after, said)
            made += steps_of(said)
            if status == 0 or said[-1][0] == "result":  # the signal came to a job that had ended
                break
            if status == -sent and said[-1] == ["ending"]:  # and one that came just before the result was said
                break
            assert status == 143, (status, where)
            attempts += 1
            ended += 1
        assert made == list(range(1, EPOCHS * STEPS + 1)), (made, where)
        if said[-1] == ["ending"]:
            continue
        assert said[-1][1] == unbroken[1], (unbroken, where)
        for name, values in (
            unbroken[2].items() if job == "fit" else ()
        ):  # of which parts were added up in another order
            assert said[-1][2][name] == pytest.approx(values, rel=1e-12), (name, where)
    return ended


if __name__ == "__main__":
    torch.set_num_threads(1)  # which forked processes can use
    folder, job, moments, seed = sys.argv[1:]
    print(prove(job, os.path.join(folder, "job"), int(moments), int(seed)))
