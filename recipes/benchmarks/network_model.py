"""A model of the step time of data parallelism over a given link, fitted to some measured steps.

A step computes, and then waits for what it has not yet received of the other hosts' gradients:

    step = forward + backward + optimizer + own work of the way + what of the sums is left at the end of backward

A bucket's sum begins when its gradients are there and the sums before it are done, and takes

    bytes * 2 (P - 1) / P * (8 / (efficiency * rate) + waits * delay / MiB) + 2 (P - 1) * delay

between P hosts: a ring sends each byte 2 (P - 1) / P times, in pieces that wait for one another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from slow_network import Link

MIB = 2**20
EFFICIENCIES = np.linspace(0.5, 1.0, 26)
WAITS = np.linspace(0.0, 4.0, 41)


@dataclass(frozen=True)
class Traffic:
    """What a way to train sends.

    Args:
        bits: of each number of a gradient.
        rank: of PowerSGD; ``None`` means that gradients travel whole.
        overlaps: whether sums begin during backward.
    """

    bits: int = 32
    rank: int | None = None
    overlaps: bool = True

    def buckets(self, shapes: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
        """Return what travels, in the order in which backward makes it.

        Args:
            shapes: of the model's parameters.

        Returns:
            Of each bucket the share of backward after which it is there, and its bytes.
        """
        total = sum(math.prod(shape) for shape in shapes)
        done = 0
        buckets = []
        for shape in reversed(shapes):
            done += math.prod(shape)
            num_bytes = self._numbers(shape) * self.bits / 8
            buckets.append((done / total if self.overlaps else 1.0, num_bytes))
        return buckets if self.overlaps else [(1.0, sum(num_bytes for _, num_bytes in buckets))]

    def _numbers(self, shape: Sequence[int]) -> int:
        whole = math.prod(shape)
        if self.rank is None or len(shape) < 2:
            return whole
        return min(whole, self.rank * (shape[0] + whole // shape[0]))


@dataclass(frozen=True)
class Costs:
    """What the model is fitted to.

    Args:
        forward: seconds of one forward pass.
        backward: seconds of one backward pass.
        optimizer: seconds of the optimizer's step.
        efficiency: the part of a link's rate at which gradients travel.
        waits: how many times the link's delay each MiB waits.
        own_work: by way, the seconds that it adds to a step on the processor.
    """

    forward: float
    backward: float
    optimizer: float
    efficiency: float = 1.0
    waits: float = 0.0
    own_work: Mapping[str, float] = field(default_factory=dict)

    @property
    def compute(self) -> float:
        """Seconds of a step that adds nothing up."""
        return self.forward + self.backward + self.optimizer

    def step(
        self,
        way: str,
        traffic: Traffic,
        shapes: Sequence[Sequence[int]],
        num_hosts: int,
        link: Link,
        pace: float = 1.0,
    ) -> float:
        """Return the seconds that a step is predicted to take.

        Args:
            way: its name, for its own work.
            traffic: what it sends.
            shapes: of the model's parameters.
            num_hosts: with one replica each.
            link: of each host.
            pace: how many times as long as at first the processors take, because of other work.
        """
        backward = pace * self.backward
        end = 0.0
        for share, num_bytes in traffic.buckets(shapes):
            end = max(end, share * backward) + self.sum(num_bytes, num_hosts, link)
        return pace * (self.compute + self.own_work.get(way, 0.0)) + max(0.0, end - backward)

    def sum(self, num_bytes: float, num_hosts: int, link: Link) -> float:
        """Return the seconds that an all-reduce is predicted to take.

        Args:
            num_bytes: of each host's tensor.
            num_hosts: that add up.
            link: of each host.
        """
        sent = num_bytes * 2 * (num_hosts - 1) / num_hosts
        num_waits = 2 * (num_hosts - 1) + self.waits * sent / MIB
        return sent * 8 / (self.efficiency * link.mbit * 1e6) + num_waits * 1e-3 * link.delay_ms


def fit(
    compute: Costs,
    traffic: Mapping[str, Traffic],
    shapes: Sequence[Sequence[int]],
    num_hosts: int,
    measured: Mapping[Link, Mapping[str, float]],
    paces: Mapping[Link, float],
) -> Costs:
    """Return the costs with which the model is nearest to what was measured, by the sum of squared relative errors.

    Args:
        compute: the times that were measured without a network.
        traffic: what each way sends.
        shapes: of the model's parameters.
        num_hosts: with one replica each.
        measured: seconds of a step, by link and way.
        paces: of the processors while each link was there.
    """
    pace = np.array([paces[link] for link in measured])
    best, least = compute, math.inf
    for efficiency, waits in itertools.product(EFFICIENCIES, WAITS):
        costs = replace(compute, efficiency=float(efficiency), waits=float(waits))
        own_work, errors = {}, []
        for way, sent in traffic.items():
            seconds = np.array([by_way[way] for by_way in measured.values()])
            known = np.array([costs.step(way, sent, shapes, num_hosts, link, paces[link]) for link in measured])
            unit, rest = pace / seconds, 1 - known / seconds  # of its own work, and what that has to explain
            own_work[way] = max(0.0, float(unit @ rest / (unit @ unit)))
            errors.append(np.sum((own_work[way] * unit - rest) ** 2))
        if sum(errors) < least:
            least = sum(errors)
            best = replace(costs, own_work=own_work)
    return best
