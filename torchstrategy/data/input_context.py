"""``InputContext``: what a dataset function is told about the pipelines and replicas of its strategy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["InputContext"]


@dataclass(frozen=True)
class InputContext:
    """Passed to the dataset function of ``distribute_datasets_from_function``.

    Args:
        num_input_pipelines: how many input pipelines feed the strategy: one for each process, or for each replica.
        input_pipeline_id: which of them the function makes, from 0.
        num_replicas_in_sync: replicas over all processes.

    Example:
        >>> context = ts.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(64)
        16
        >>> context
        InputContext(input pipeline id 1, total: 2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return one replica's part of the global batch size.

        Args:
            global_batch_size: examples in a step over all replicas.

        Returns:
            ``global_batch_size // num_replicas_in_sync``.

        Raises:
            ValueError: the size is not divisible.

        Example:
            >>> ts.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(10)
            5
        """
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync!r}. Choose a multiple of the number of replicas."
            )
        return global_batch_size // self.num_replicas_in_sync

    def __repr__(self) -> str:
        return f"InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
