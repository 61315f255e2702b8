"""Collectives between processes that drive one XLA device each, such as a TPU chip.

Each one is a program of its own, not a part of the step's graph. All processes must run the same program, or devices
hang; but a step's graph differs between them wherever shares are uneven or a function looks at its rank. So what was
traced runs first, then the ranks tell each other that they have come so far, and then all launch the same collective.
Nothing waits for a device: the host only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchstrategy.collectives.backends import DataBackend, StagedBackend, Wait
from torchstrategy.collectives.connections import Check

if TYPE_CHECKING:
    from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["XlaBackend"]

_NARROW = (torch.float16, torch.bfloat16)


class XlaBackend:
    """XLA's own collectives, for tensors of any dtype on the runtime's device.

    Args:
        runtime: this process's device.
        ordinals: for each rank the place of its device in XLA's order.
        agree: waits until every rank is about to launch the same collective; raises if one has failed.
        host_backend_of: returns what carries a tensor of the CPU, by its bytes.
    """

    route = "XLA"

    def __init__(
        self,
        runtime: TpuRuntime,
        ordinals: Sequence[int],
        agree: Callable[[], object],
        host_backend_of: Callable[[int], DataBackend],
    ) -> None:
        if sorted(ordinals) != list(range(len(ordinals))):
            raise RuntimeError(
                f"The processes drive the XLA devices {list(ordinals)}, in the order of ranks, but each must drive one "
                "device of its own. Start one process for each device, and leave the choice of devices to the strategy."
            )
        self._runtime = runtime
        self._ordinals = list(ordinals)
        self._agree = agree
        self._host_backend_of = host_backend_of

    def start_sum(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``; 16-bit floating-point numbers are added in ``float32`` and rounded once."""
        numbers = _as_numbers(tensor)
        total = numbers.float() if numbers.dtype in _NARROW else numbers
        self._begin()
        self._runtime.sum_over_devices(total)
        self._launch()
        if total is not numbers:
            numbers.copy_(total)
        return _look_for_failures

    def start_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Wait:
        """See ``DataBackend``; of any dtype."""
        numbers = _as_numbers(tensor)
        self._begin()
        rows = self._runtime.gather_over_devices(numbers)
        self._launch()
        for output, ordinal in zip(outputs, self._ordinals, strict=True):
            _as_numbers(output).copy_(rows[ordinal])
        return _look_for_failures

    def start_broadcast(self, tensor: Tensor) -> Wait:
        """See ``DataBackend``; of any dtype. Initial values travel so, once, through the CPU."""
        return StagedBackend(self._host_backend_of(tensor.nbytes)).start_broadcast(tensor)

    def _begin(self) -> None:
        self._runtime.sync()  # what is traced may differ between ranks, or fail on one
        self._agree()

    def _launch(self) -> None:
        self._runtime.sync()  # so that nobody's reading of the result decides when it is computed


def _as_numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _look_for_failures(check: Check) -> None:
    check()
