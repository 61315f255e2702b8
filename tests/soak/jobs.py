"""Jobs of several workers that save often, say what they do, and let planned faults happen.

Each rank writes lines to a file of its own: where it goes on from, each step with its examples, faults before they
happen, the error that ended it, and the weights at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchstrategy as ts
from torchstrategy.testing.faults import Fault, file_fault

BATCH_SIZE = 8
#: Where in a step a rank can be hit: before it meets the others, in the backward pass, after the sum of gradients and
#: the update, and in the save.
PLACES = ("before", "backward", "update", "save")
#: Faults of the chief's files, by the kind that ``file_fault`` knows.
FILE_KINDS = {"kill in a save": "kill", "torn write": "torn", "full disk": "full"}


class Plan(NamedTuple):
    """A fault of an attempt.

    Args:
        kind: of ``Fault``, or one of ``FILE_KINDS``.
        rank: where.
        step: in which step, from 0.
        place: where in the step.
        seconds: as in ``Fault``.
        at: before which call for files, from 1; after the save if it has fewer.
    """

    kind: str
    rank: int
    step: int
    place: str
    seconds: float = 0.0
    at: int = 1


class Job(NamedTuple):
    """What a job does.

    Args:
        kind: ``"fit"`` with ``BackupAndRestore``, or a ``"loop"`` with ``CheckpointManager``.
        num_steps: how many steps, in two epochs.
        save_every: a save after so many steps.
        deadline_s: of the strategy.
        stall_s: after how long without progress that is said; ``None`` leaves the default, which no attempt reaches.
    """

    kind: str
    num_steps: int
    save_every: int = 1
    deadline_s: float | None = None
    stall_s: float | None = None


def num_examples(job: Job) -> int:
    """Return the examples of an epoch, whose last batch leaves nothing for the last of several ranks."""
    return job.num_steps // 2 * BATCH_SIZE - BATCH_SIZE + 1


class Diary:
    """What a rank says, and what is planned for it.

    Args:
        folder: the job's; each rank has a file there.
        rank: this rank.
        plans: all faults.
    """

    def __init__(self, folder: Path, rank: int, plans: Sequence[Plan]) -> None:
        self._file = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._checkpoints = folder / "checkpoints"
        self._plans = [plan for plan in plans if plan.rank == rank]
        self.step = 0
        self.ids: list[int] = []

    def say(self, *words: Any) -> None:
        """Write a line, with the time."""
        os.write(self._file, json.dumps([*words, time.monotonic()]).encode() + b"\n")

    def begin(self, step: int, x: Tensor) -> None:
        """Begin a step, with examples whose numbers stand in the first column."""
        self.step, self.ids = step, x[:, 0].int().tolist()
        self.strike("before")

    def updated(self) -> None:
        """Say that the step was made."""
        self.say("step", self.step + 1, self.ids)
        self.strike("update")

    def strike(self, place: str) -> None:
        """Let happen what is planned for this place of this step."""
        for plan in self._plans:
            is_due = plan.step <= self.step if plan.kind == "slow" else plan.step == self.step
            if is_due and plan.place == place and plan.kind not in FILE_KINDS:
                if plan.step == self.step:
                    self.say("struck", plan.kind, place)
                Fault(plan.kind, plan.rank, self.step, plan.seconds).strike(plan.rank, self.step)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Let happen what is planned for the save of this step."""
        self.strike("save")
        with contextlib.ExitStack() as stack:
            hit = [plan for plan in self._plans if plan.kind in FILE_KINDS and plan.step == self.step]
            for plan in hit:
                self.say("struck", plan.kind, "save")
                stack.enter_context(file_fault(FILE_KINDS[plan.kind], plan.at, self._checkpoints))
            yield
        if any(plan.kind != "full disk" for plan in hit):  # it had fewer calls
            Fault("kill", 0, 0).strike(0, 0)


def run(job: Job, folder: Path, plans: Sequence[Plan] = ()) -> None:
    """Be a rank of one attempt, whose process ends with an error as a program's does."""
    rank = int(os.environ.get("RANK", -1))
    rank = rank if rank >= 0 else int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 2)
    if job.stall_s is not None:
        os.environ["TORCHSTRATEGY_STALL_S"] = str(job.stall_s)
        tempfile.tempdir = str(folder)  # the stacks go with the job
    diary = Diary(folder, rank, plans)
    try:
        {"fit": fit, "loop": loop}[job.kind](job, folder / "checkpoints", diary)
    except Exception as error:  # noqa: BLE001 - for the parent
        diary.say("error", type(error).__name__, str(error))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _make(job: Job, *between: nn.Module) -> tuple[ts.Strategy, nn.Module, torch.optim.Optimizer, Any]:
    options = ts.experimental.CommunicationOptions(timeout_seconds=job.deadline_s)
    strategy = ts.MultiWorkerMirroredStrategy(communication_options=options, devices=["cpu:0"])
    torch.manual_seed(0)
    with strategy.scope():
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *between, nn.Linear(4, 1)).double()
        optimizer = torch.optim.Adam(module.parameters(), 0.01)
    x = torch.randn(num_examples(job), 3, dtype=torch.float64)
    y = x.sin().sum(dim=1, keepdim=True)
    x[:, 0] = torch.arange(len(x))
    # Of its own, because a checkpoint of a loop does not hold the one from which the second epoch would be drawn.
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, BATCH_SIZE, shuffle=True, generator=generator)
    return strategy, module, optimizer, loader


def _without_numbers(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], x[:, 1:2] ** 2], dim=1)


class _Model(ts.Model):
    diary: Diary

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.diary.begin(self.iterations, x)
        return super().train_step((_without_numbers(x), y))


class _Backup(ts.callbacks.BackupAndRestore):
    diary: Diary

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self.diary.say("restored", self.model.iterations)

    def _save(self, **options: Any) -> None:
        with self.diary.saving():
            super()._save(**options)


def fit(job: Job, folder: Path, diary: Diary) -> None:
    """Train with ``fit``; a full disk is passed over."""
    strategy, module, optimizer, loader = _make(job, nn.Dropout(0.25))
    with strategy.scope():
        model = _Model(module)
    model.diary = diary
    module[0].weight.register_hook(lambda _: diary.strike("backward"))
    optimizer.register_step_post_hook(lambda *_: diary.updated())
    model.compile(optimizer, "mse")
    backup = _Backup(folder, job.save_every, delete_checkpoint=False, on_write_error="warn")
    backup.diary = diary
    model.fit(loader, epochs=2, callbacks=[backup], verbose=0)
    diary.say("result", [p.tolist() for p in module.parameters()])


def loop(job: Job, folder: Path, diary: Diary) -> None:
    """Train with a loop; a full disk ends it."""
    strategy, module, optimizer, loader = _make(job)
    dataset = strategy.experimental_distribute_dataset(loader)
    made = torch.tensor(0)
    checkpoint = ts.train.Checkpoint(module=module, optimizer=optimizer, dataset=dataset, made=made)
    manager = ts.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    manager.restore_or_initialize()
    diary.say("restored", int(made))

    def step(batch: Any) -> None:
        x, y = batch
        diary.begin(int(made), x)
        optimizer.zero_grad()
        squared = (module(_without_numbers(x)) - y).square().mean(dim=1)
        ts.nn.compute_average_loss(squared, global_batch_size="actual").backward()
        diary.strike("backward")
        optimizer.step()
        diary.updated()

    while made < job.num_steps:
        for batch in dataset:
            strategy.run(step, args=(batch,))
            made.add_(1)
            if made % job.save_every == 0:
                with diary.saving():
                    manager.save()
    diary.say("result", [p.tolist() for p in module.parameters()])
