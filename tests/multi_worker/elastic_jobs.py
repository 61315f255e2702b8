"""A job under a real launcher that loses processes and gets others, and what each of them has trained on.

``python tests/multi_worker/elastic_jobs.py worker KIND FOLDER`` is the program that the launchers start.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.experimental import ElasticTraining

NUM_EXAMPLES, BATCH_SIZE, EPOCHS, ROOM = 30, 8, 40, 3
STEPS_AN_EPOCH = -(-NUM_EXAMPLES // BATCH_SIZE)
_PATIENCE_S = 150.0


def data():
    x = torch.arange(NUM_EXAMPLES, dtype=torch.float64)[:, None] / NUM_EXAMPLES
    return x, (3 * x).sin()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()


class Diary:
    """Notes what a process trains on, at a pace that the driver sets."""

    def __init__(self, folder, size):
        self._folder = folder
        self._size = size
        self._path = f"{folder}/{os.getpid()}.steps"

    def note(self, step, x):
        ids = [round(value * NUM_EXAMPLES) for value in x[:, 0].tolist()]
        round_ = os.environ.get("MASTER_PORT", "alone")  # each has a store of its own
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([time.monotonic_ns(), round_, self._size, step, ids]) + "\n")

    def pause(self):
        if not os.path.exists(f"{self._folder}/fast"):
            time.sleep(0.25)


class Noted(ts.Model):
    diary = None

    def train_step(self, data):
        self.diary.note(self.iterations, data[0])
        return super().train_step(data)


def train(kind, folder, strategy=None):
    """Train on this process's part of the job, and return the weights."""
    strategy = strategy or ts.MultiWorkerMirroredStrategy()
    diary = Diary(folder, strategy.num_replicas_in_sync)
    elastic = ElasticTraining(f"{folder}/state", max_replica_batch_size=ROOM, save_freq=1)
    with strategy.scope():
        model = Noted(net()) if kind == "fit" else net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*data()), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    if kind == "fit":
        Noted.diary = diary
        model.compile(optimizer, "mse")
        pause = ts.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: diary.pause())
        model.fit(loader, epochs=EPOCHS, callbacks=[elastic, pause], verbose=0)
        return [parameter.detach().clone() for parameter in model.parameters()]
    dataset = strategy.experimental_distribute_dataset(loader)

    def step(batch):
        optimizer.zero_grad()
        diary.note(handler.total_run_calls, batch[0])
        for x, y in elastic.micro_batches(batch):
            losses = (model(x) - y).square().mean(1)
            ts.nn.compute_average_loss(losses, global_batch_size="actual").backward()
        optimizer.step()

    def whole_step(batch):
        strategy.run(step, args=(batch,))
        scheduler.step()
        diary.pause()

    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, dataset=dataset)
    with elastic.handler(checkpoint) as handler:
        while handler.total_run_calls < EPOCHS * STEPS_AN_EPOCH:
            for batch in dataset:
                handler.run(whole_step, batch)
    return [parameter.detach().clone() for parameter in model.parameters()]


class Launchers:
    """The launchers of several hosts, all on this one.

    Args:
        launcher: the words of the command that starts one.
        kind: ``"fit"`` or ``"loop"``.
        folder: where the job writes.
        port: where the launchers meet, which the first one keeps.
    """

    def __init__(self, launcher, kind, folder, port):
        self.folder = Path(folder)
        self._arguments = [__file__, "worker", kind, str(folder)]
        self._launcher = launcher
        self._port = port
        self.running = []

    def start(self):
        settings = f"is_host={int(not self.running)},last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [
            *(sys.executable, "-m", *self._launcher, "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=50"),
            *(f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={settings}", "--rdzv-id=elastic"),
            *("--local-addr=127.0.0.1", *self._arguments),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.folder / f"launcher{len(self.running)}.log", "w", encoding="utf-8") as log:
            self.running.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    def kill(self, index):
        """End a host: the launcher and its processes."""
        launcher = self.running[index]
        for pid in [launcher.pid, *_below(launcher.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()

    def close(self):
        for index, launcher in enumerate(self.running):
            if launcher.poll() is None:
                self.kill(index)

    def records(self):
        """Return time, round, size, step and examples of all that was trained on, in the order of time."""
        found = []
        for path in self.folder.glob("*.steps"):
            lines = path.read_text().splitlines(keepends=True)
            found += [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(found)

    def wait_for(self, size, num_steps=3):
        """Wait until so many processes have made some steps together."""
        end = time.monotonic() + _PATIENCE_S
        while len({step for _, _, of_size, step, _ in self.records() if of_size == size}) < num_steps:
            assert time.monotonic() < end, f"no steps of {size} processes\n{self.logs()}"
            assert any(launcher.poll() is None for launcher in self.running), self.logs()
            time.sleep(0.1)

    def finish(self, indices):
        (self.folder / "fast").touch()
        for index in indices:
            assert self.running[index].wait(_PATIENCE_S) == 0, self.logs()

    def logs(self):
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("launcher*.log"))
        )


def _below(pid):
    """Return the processes that a process has started, and those that they have."""
    try:
        children = [
            int(child)
            for thread in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [each for child in children for each in (child, *_below(child))]


if __name__ == "__main__":
    weights = train(*sys.argv[2:])
    if os.environ.get("RANK") == "0":
        torch.save(weights, f"{sys.argv[3]}/weights.pt")
