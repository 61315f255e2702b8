"""Training on a number of replicas that changes: what a job needs besides a launcher that starts it again."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from typing_extensions import override

from torchstrategy.base import tree
from torchstrategy.base.log import logger
from torchstrategy.base.values import mark_windows, num_rows_of, set_shares, shares_of
from torchstrategy.checkpoint.checkpoint import Checkpoint
from torchstrategy.checkpoint.preemption import TerminationConfig, check_positive
from torchstrategy.checkpoint.preemption_handler import PreemptionCheckpointHandler
from torchstrategy.data.micro_batches import micro_batches
from torchstrategy.fit.callbacks.backup import BackupAndRestore
from torchstrategy.fit.callbacks.callback import Logs
from torchstrategy.strategies.default import get_replica_context

__all__ = ["ElasticTraining"]


class ElasticTraining(BackupAndRestore):
    """Lets a job go on with fewer or more replicas, on the trajectory that any number of them has.

    The launcher (``torchstrategy launch --nnodes=1:4``, ``torchrun``, Ray) starts all processes of the job again when
    one is lost, or when one comes. This object saves and restores what the training depends on, also when a process is
    told that it will be ended, so that the next ones go on at the same step. **The global batch stays as it is**, in
    examples and their order, and so do learning rates and all else that is counted in steps; where it no longer fits
    the replicas that are left, each takes its share in several parts that make one optimizer step.

    In ``fit`` it is a callback. In a loop of your own, ``handler`` restores, counts and saves, and ``micro_batches``
    cuts a replica's share.

    Args:
        directory: where the state is saved; all processes share it, and it is for this object alone.
        max_replica_batch_size: how many examples a replica has room for in ``fit`` and its validation; ``None`` means
            any number.
        save_freq: after so many batches the state is saved, and so many are lost at most if a process is killed.
        delete_checkpoint: delete the state when ``fit`` is done. By default it stays, so that a job which is started
            again after its end does not begin anew.
        termination_config: what is a notice, how long training may go on after it, and what follows. In a thread, such
            as those of Ray's workers, signals are none, since Python handles them in the main thread only.

    Raises:
        ValueError: an argument is out of range; or as ``BackupAndRestore``.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> x, y = torch.arange(12.0).view(6, 2) / 12, torch.ones(6, 1)
        >>> weights = []
        >>> for devices, room in (["cpu:0", "cpu:1"], None), (["cpu:0"], 2):
        ...     with ts.MirroredStrategy(devices).scope():
        ...         _ = torch.manual_seed(0)
        ...         model = ts.Model(torch.nn.Linear(2, 1).double())
        ...     model.compile("sgd", "mse")
        ...     elastic = ts.experimental.ElasticTraining(f"{folder.name}/{len(devices)}", max_replica_batch_size=room)
        ...     _ = model.fit(x.double(), y.double(), batch_size=6, epochs=2, callbacks=[elastic], verbose=0)
        ...     weights.append(model.module.weight.detach().clone())
        >>> torch.allclose(*weights, rtol=1e-12)  # two replicas with 3 examples each, and one with 3 parts of 2
        True
        >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_replica_batch_size: int | None = None,
        save_freq: int = 100,
        delete_checkpoint: bool = False,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        check_positive(save_freq, "ElasticTraining(save_freq=...)", "a positive number of batches")
        if max_replica_batch_size is not None:
            expected = "a positive number of examples, or None"
            check_positive(max_replica_batch_size, "ElasticTraining(max_replica_batch_size=...)", expected)
        super().__init__(
            directory,
            save_freq,
            delete_checkpoint=delete_checkpoint,
            save_before_preemption=True,
            termination_config=termination_config,
        )
        self.max_replica_batch_size = max_replica_batch_size

    def handler(self, checkpoint: Checkpoint) -> PreemptionCheckpointHandler:
        """Return what restores, counts and saves a loop of your own; use it in a ``with`` block.

        Args:
            checkpoint: all that the loop depends on: model, optimizer, scheduler, and the distributed dataset.

        Raises:
            ValueError: the directory holds checkpoints of something else.
            RuntimeError: called in replica context.

        Example:
            >>> import tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(2, 1)
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> dataset = strategy.experimental_distribute_dataset(torch.ones(8, 2), batch_size=4)
            >>> elastic = ts.experimental.ElasticTraining(folder.name, max_replica_batch_size=1)
            >>> def step(batch):
            ...     optimizer.zero_grad()
            ...     for x in elastic.micro_batches(batch):
            ...         ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual").backward()
            ...     optimizer.step()
            >>> checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, dataset=dataset)
            >>> with elastic.handler(checkpoint) as handler:
            ...     while handler.total_run_calls < 4:
            ...         for batch in dataset:
            ...             handler.run(strategy.run, step, args=(batch,))
            ...     handler.total_run_calls
            4
            >>> folder.cleanup()
        """
        return PreemptionCheckpointHandler(
            None, checkpoint, self.backup_dir, self._termination, save_freq=int(self.save_freq)
        )

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yield a replica's share of a batch in parts that it has room for. Replica context only.

        Each part's loss is divided by what the whole step has: by a constant, by ``global_batch_size="actual"``, and
        by ``ts.nn.scale_mean_loss``. A loss that is a mean over the part is not, so sums of them would be too large.

        Args:
            batch: what the replica function was called with: a structure of tensors ``[examples, ...]``.

        Raises:
            RuntimeError: called in cross-replica context, or the batch is none of a distributed dataset.
        """
        context: Any = get_replica_context()
        if context is None:
            raise RuntimeError(
                "ElasticTraining.micro_batches was called in cross-replica context. Call it in the function that is "
                "given to strategy.run, with the batch that the function gets."
            )
        if context.num_replicas_in_sync > 1:
            batch = self._with_shares(context, batch)
        given = context._inputs
        limit = self.max_replica_batch_size
        parts = [batch] if limit is None else micro_batches(batch, 1, limit)
        mark_windows([parts])
        try:
            for part in parts:
                context._work_on(part)
                yield part
        finally:
            context._work_on(given)

    @staticmethod
    def _with_shares(context: Any, batch: Any) -> Any:
        """Return a batch that says how it was split, also where the function has computed it from the one it got."""
        if shares_of(batch):
            return batch
        if num_rows_of(batch) != context._num_own_examples:
            context.actual_batch_size(batch)  # raises, and says why
        shares = context.batch_shares
        return tree.map_leaves(
            lambda leaf: set_shares(leaf.view_as(leaf), shares) if isinstance(leaf, Tensor) and leaf.dim() else leaf,
            batch,
        )

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        if self.model.distribute_strategy._coordinator_class() is not None:
            raise ValueError(
                "ElasticTraining is for replicas that step together. A ParameterServerStrategy goes on by itself when "
                "workers are lost or come; use BackupAndRestore for its state."
            )
        super().on_train_begin(logs)
        self._trainer.limit_replica_batches(self.max_replica_batch_size)

    @property
    @override
    def _termination(self) -> TerminationConfig:
        config = self.termination_config or TerminationConfig()
        if threading.current_thread() is threading.main_thread() or not config.signals:
            return config
        logger.info(
            "ElasticTraining: signals are not noticed in this thread. What is lost with a process is at most what was "
            "done since the last save."
        )
        return config._replace(signals=())

    @override
    def _release(self) -> None:
        try:
            self._trainer.limit_replica_batches(None)
        finally:
            super()._release()
