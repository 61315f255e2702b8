"""Variables of central storage: one value, which every assignment of the replicas is aggregated into."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.options import VariableAggregation
from torchstrategy.replicas.distributed_variables import MirroredVariable
from torchstrategy.replicas.variables import Variable

__all__ = ["AggregatingVariable"]


class AggregatingVariable(MirroredVariable):
    """A variable with one value on the parameter device, which the replicas see. Made by ``ts.Variable``.

    When it is synchronised has no meaning: what replicas assign is aggregated at once.
    """

    @property
    @override
    def values(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The one value, as a plain variable."""
        return super().values[:1]

    @override
    def _writes_locally(self) -> bool:
        return False

    @override
    def _update(self, method: str, value: Any) -> Any:
        context = current_replica_context()
        if (
            self.options.aggregation is VariableAggregation.NONE
            and context is not None
            and context.strategy is self.strategy
        ):
            self._refuse(method)
        return super()._update(method, value)

    def _refuse(self, method: str) -> NoReturn:
        raise ValueError(
            f"{method} in `run` needs an aggregation method for AggregatingVariable {self.name!r}, which has one value "
            "for all replicas. Make it with ts.Variable(..., aggregation=ts.VariableAggregation.SUM, MEAN or "
            "ONLY_FIRST_REPLICA), or assign outside `run`."
        )

    @override
    def note_separate_writes(self) -> None:
        first, *others = self.copies
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for copy in others:
                copy.copy_(first)
        self.note_in_step()

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"AggregatingVariable({Variable.__repr__(self.copies[0])}, aggregation={self.options.aggregation})"
