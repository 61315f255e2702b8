"""Variables on parameter servers that several processes, each with several replicas, change by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.options import VariableAggregation
from torchstrategy.ps.served import ServedVariable
from torchstrategy.replicas.runner import MergeRequest
from torchstrategy.replicas.variables import fitting

__all__ = ["SharedVariable"]


class SharedVariable(ServedVariable):
    """A ``ts.Variable`` on a parameter server, whose assignments by all processes count."""

    @override
    def _update(self, method: str, value: Any) -> Any:
        context = current_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return super()._update(method, value)
        aggregation = self.options.aggregation
        if aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{method} in `run` needs an aggregation method for variable {self.name!r}, which has one value for "
                "all replicas. Make it with ts.Variable(..., aggregation=ts.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA), or assign outside `run`."
            )

        def merge(values: list[Any]) -> list[Tensor]:
            total = values[0]
            if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
                stacked = torch.stack([fitting(self, own) for own in values])
                is_mean = aggregation is VariableAggregation.MEAN
                total = stacked.mean(0) if is_mean else stacked.sum(0, dtype=self.dtype)
            self.bindings.update(self.binding, method, self._fitting(total))
            now = self.read_value().detach()
            return [now.clone() for _ in values]

        return context._meet(MergeRequest(f"{method} of variable {self.name!r}", merge, value))
