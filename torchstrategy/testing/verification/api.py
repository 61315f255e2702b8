"""``verify_replication``, and what it returns and prints."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base.values import DistributedValues
from torchstrategy.strategies.mirrored_strategy import MirroredStrategy
from torchstrategy.strategies.strategy import Strategy
from torchstrategy.testing.processes import ProcessPool, RemoteError
from torchstrategy.testing.verification.causes import UNDECIDED, Cause, constant_divisor, find_causes
from torchstrategy.testing.verification.deviations import Deviation, Run, dump, load, measured, tensors_of
from torchstrategy.testing.verification.recorder import Recorder

__all__ = ["Comparison", "VerificationReport", "compare", "verify_replication"]

_NUM_SHOWN = 6


@dataclass
class Comparison:
    """One run beside that of one replica."""

    title: str
    num_steps: int
    deviations: list[Deviation] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every number is that of one replica."""
        return self.num_steps > 0 and not (self.deviations or self.causes or self.error)

    @property
    def is_undecided(self) -> bool:
        """Whether numbers differ, but only for causes that leave open whether the program is right."""
        return bool(self.causes) and self.error is None and {cause.kind for cause in self.causes} <= UNDECIDED

    def __str__(self) -> str:
        if self.ok:
            return f"{self.title}: right in all {self.num_steps} steps"
        what = "WRONG" if self.causes or self.deviations else "FAILED"
        what = "CAN'T BE COMPARED" if self.is_undecided else what
        lines = [f"{self.title}: {what if self.num_steps or self.error else 'no step was recorded'}"]
        lines += [f"  cause: {cause}" for cause in self.causes]
        if not self.is_undecided:
            lines += [f"  {deviation}" for deviation in self.deviations[:_NUM_SHOWN]]
            if len(self.deviations) > _NUM_SHOWN:
                lines.append(f"  and {len(self.deviations) - _NUM_SHOWN} more")
        if self.error:
            lines += ["  the program failed:", *(f"    {line}" for line in self.error.strip().splitlines()[-8:])]
        return "\n".join(lines)


@dataclass
class VerificationReport:
    """Says whether several replicas give the numbers of one, and if not, where and why.

    Its text is the readable report.
    """

    comparisons: list[Comparison]

    @property
    def ok(self) -> bool:
        """Whether every number of every run is that of one replica."""
        return bool(self.comparisons) and all(comparison.ok for comparison in self.comparisons)

    @property
    def causes(self) -> list[Cause]:
        """The causes that were found, of all runs."""
        return [cause for comparison in self.comparisons for cause in comparison.causes]

    @property
    def kinds(self) -> set[str]:
        """The kinds of the causes."""
        return {cause.kind for cause in self.causes}

    def __str__(self) -> str:
        return "\n".join(map(str, self.comparisons))


def compare(reference: Run, runs: list[Run]) -> VerificationReport:
    """Compare runs with that of one replica.

    Args:
        reference: the run with one replica.
        runs: the runs with several.

    Returns:
        The report.
    """
    alone = Comparison(reference.title, reference.num_steps, [], constant_divisor(reference), reference.error)
    comparisons = [] if alone.ok else [alone]
    for run in runs:
        found, causes = find_causes(run, reference) if reference.replicas and run.replicas else ([], [])
        steps = min(run.num_steps, reference.num_steps)
        comparison = Comparison(run.title, steps, found, causes, run.error)
        if run.error is None and reference.error is None and run.num_steps != reference.num_steps:
            text = f"{run.num_steps} steps where one replica makes {reference.num_steps}"
            comparison.causes.append(Cause("another number of steps", steps, text))
        comparisons.append(comparison)
    return VerificationReport(comparisons)


_SEED = 0


def verify_replication(
    build: Callable[[Strategy], Mapping[str, Any]],
    batches: Any,
    replicas: Sequence[int] = (2, 3),
    processes: Sequence[int] = (2,),
    *,
    timeout_s: float = 120.0,
) -> VerificationReport:
    """Run a program's steps with one replica and with several, and say where the numbers differ and why.

    All runs are on CPUs and begin with the same seed. Compared are, step by step and by name, the gradients that each
    optimizer step uses, weights, buffers, metrics, what the step returns, and which examples the replicas see: to 1e-10
    in float64 and 1e-5 in float32, relative to the largest number of the kind and growing by as much with each step.

    Args:
        build: called as ``build(strategy)`` in the strategy's scope. Returns the program's parts by name: ``"step"``, a
            function that is called with each distributed batch, outside replica functions, as in the body of a training
            loop; and all that is to be looked at: modules, optimizers, and metrics, which are objects with ``result``
            or ``compute``, or functions without arguments that return a number or tensor.
        batches: the global batches, nested structures of tensors with the examples along axis 0; or a function
            ``batches(strategy)`` that returns the distributed batches. Read once per run, so no iterator.
        replicas: for each number, a run with so many replicas in one process.
        processes: for each number, a run with so many processes of one replica. ``build`` and ``batches`` are then
            pickled, so functions must be at the top level of a module.
        timeout_s: seconds that the processes may take.

    Returns:
        The report. ``ok`` says whether all is right; ``causes`` has the causes, each with its ``kind``, ``step`` and
        ``text``; its text is for people.

    Raises:
        TypeError: ``build`` is not a function, ``batches`` is an iterator, or what ``build`` returns is no mapping with
            a ``"step"``.
        ValueError: a number is less than 2, there is nothing to run, or something can't be pickled.

    Example:
        >>> def build(strategy):
        ...     model = torch.nn.Linear(3, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def replica_step(x):
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()  # a mean over the replica's share
        ...         optimizer.step()
        ...     return {"step": lambda x: strategy.run(replica_step, args=(x,)), "model": model, "optimizer": optimizer}
        >>> report = ts.testing.verify_replication(build, [torch.ones(4, 3)], replicas=(2,), processes=())
        >>> report.ok, report.kinds
        (False, {'loss not divided'})
    """
    _check(build, batches, replicas, processes)
    reference = _run_here(build, batches, 1)
    runs = [_run_here(build, batches, number) for number in replicas]
    runs += [_run_in_processes(build, batches, number, timeout_s) for number in processes]
    return compare(reference, runs)


def _check(build: Any, batches: Any, replicas: Sequence[int], processes: Sequence[int]) -> None:
    if not callable(build):
        raise TypeError(f"build must be a function of the strategy. Received: {build!r}")
    if not callable(batches) and (not isinstance(batches, Iterable) or iter(batches) is batches):
        raise TypeError(
            "batches must be a list of global batches, a dataset that can be read several times, or a function of the "
            f"strategy. Received: {batches!r}"
        )
    for name, numbers in (("replicas", replicas), ("processes", processes)):
        if any(not isinstance(number, int) or number < 2 for number in numbers):
            raise ValueError(
                f"{name} must be numbers from 2; one replica is what they are compared with. Got: {numbers}"
            )
    if not replicas and not processes:
        raise ValueError("replicas and processes are both empty: there is nothing to compare with one replica.")
    if processes:
        try:
            pickle.dumps((build, batches))
        except Exception as error:
            raise ValueError(
                "build and batches are sent to other processes, so functions must be at the top level of a module. "
                f"Or pass processes=(). They can't be pickled: {error}"
            ) from error


def _run_here(build: Any, batches: Any, number: int) -> Run:
    strategy = MirroredStrategy(devices=[f"cpu:{k}" for k in range(number)])
    return _run(strategy, build, batches, 1)


def _run_in_processes(build: Any, batches: Any, number: int, timeout_s: float) -> Run:
    with ProcessPool(number, timeout_s) as pool:
        return _run_in_pool(pool, build, batches)


def _run_in_pool(pool: ProcessPool, build: Any, batches: Any) -> Run:
    run = Run(pool.size, pool.size)
    try:
        answers = pool.run(_run_on_rank, build, batches)
    except RemoteError as error:
        run.error = str(error)
        return run
    for answer in map(load, answers):
        run.replicas.update(answer.replicas)
        run.error = run.error or answer.error
        run.is_single_precision |= answer.is_single_precision
    return run


def _run_on_rank(build: Any, batches: Any) -> bytes:
    strategy = MirroredStrategy(devices=["cpu:0"])
    return dump(_run(strategy, build, batches, strategy.num_replicas_in_sync))


def _run(strategy: Strategy, build: Any, batches: Any, num_processes: int) -> Run:
    run = Run(strategy.num_replicas_in_sync, num_processes)
    state = torch.get_rng_state()
    torch.manual_seed(_SEED)
    recorder = Recorder()
    ids = list(strategy.placement.local_replica_ids)
    try:
        with recorder.recording():
            _record(strategy, build, batches, recorder, ids)
    except _BuildError as error:
        raise error.cause from None
    except Exception:  # noqa: BLE001 - what the program raises is a result
        run.error = traceback.format_exc()
        if recorder.has_unfinished:
            for local_id, replica in enumerate(ids):
                recorder.finish_step(replica, local_id)
    finally:
        torch.set_rng_state(state)
    run.replicas = {replica: recorder.replicas[replica] for replica in ids if replica in recorder.replicas}
    run.is_single_precision = recorder.is_single_precision
    run.known = recorder.known
    return run


class _BuildError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _record(strategy: Strategy, build: Any, batches: Any, recorder: Recorder, ids: Sequence[int]) -> None:
    with strategy.scope():
        program = build(strategy)
    if not isinstance(program, Mapping) or not callable(program.get("step")):
        raise _BuildError(TypeError(f'build must return a mapping with a function "step". Received: {program!r}'))
    parts = {name: part for name, part in program.items() if name != "step"}
    for name, part in parts.items():
        if isinstance(part, nn.Module) and not _is_metric(part):
            recorder.watch_module(name, part)
    for name, part in parts.items():
        if isinstance(part, Optimizer):
            recorder.watch_optimizer(name, part)
    for local_id, replica in enumerate(ids):
        recorder.note_initial(replica, local_id)
    recorder.forget_steps()
    data = batches(strategy) if callable(batches) else strategy.experimental_distribute_dataset(batches)
    for batch in data:
        for replica, share in zip(ids, strategy.experimental_local_results(batch), strict=False):
            recorder.note_batch(replica, share)
        result = program["step"](batch)
        values, metrics = _values(result), _metrics(parts)
        for local_id, replica in enumerate(ids):
            step = recorder.finish_step(replica, local_id)
            step.values, step.metrics = values, metrics


def _is_metric(part: Any) -> bool:
    return callable(getattr(part, "result", None)) or callable(getattr(part, "compute", None))


def _metrics(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, part in parts.items():
        if isinstance(part, Optimizer) or (isinstance(part, nn.Module) and not _is_metric(part)):
            continue
        read = next((getattr(part, key) for key in ("result", "compute") if callable(getattr(part, key, None))), part)
        if not callable(read):
            raise TypeError(f"{name} must be a module, an optimizer, a metric or a function. Received: {part!r}")
        value = read()
        for k, tensor in enumerate(tensors_of(value) if not isinstance(value, (int, float)) else [torch.tensor(value)]):
            found[name if k == 0 else f"{name}[{k}]"] = measured(tensor)
    return found


def _values(result: Any) -> dict[str, Tensor]:
    """Return what a step returned, if it is for all replicas: shares of replicas have no like with one replica."""
    if isinstance(result, (int, float)):
        result = torch.tensor(result, dtype=torch.float64)
    if isinstance(result, DistributedValues) or _has_shares(result):
        return {}
    with contextlib.suppress(TypeError):
        return {f"[{k}]": measured(tensor) for k, tensor in enumerate(tensors_of(result))}
    return {}


def _has_shares(result: Any) -> bool:
    if isinstance(result, Mapping):
        return any(map(_has_shares, result.values()))
    if isinstance(result, (list, tuple)):
        return any(map(_has_shares, result))
    return isinstance(result, DistributedValues)
