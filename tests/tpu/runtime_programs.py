"""What the tests of the runtime run in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from torchstrategy.xla.runtime import get_runtime


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """Return what a call that fails says."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def replicas_view() -> tuple[Any, ...]:
    """Each replica adds its rows; return the number of devices, what replicas see, their sums and the sum of these."""
    runtime = get_runtime()
    runtime.start(spmd=True)
    count = runtime.num_devices
    batch = runtime.upload([torch.full((2, 3), float(index)) for index in range(count)])
    local = runtime.enter(batch, split=True)
    sums = runtime.stack(local.sum())
    total = sums.sum(0)
    runtime.sync()
    rows = [row.tolist() for row in runtime.rows(sums)]
    return count, runtime.num_local_devices, tuple(local.shape), rows, total.item()


def starts_twice() -> tuple[bool, bool, str]:
    runtime = get_runtime()
    was = runtime.is_started
    runtime.start(spmd=True)
    runtime.start(spmd=True)
    return was, runtime.is_started, message_of(runtime.start, spmd=False)


def starts_after_a_tensor() -> str:
    import torch_xla

    tensor = torch.zeros(3, device=torch_xla.device())
    message = message_of(get_runtime().start, spmd=True)
    assert not get_runtime().is_started
    assert tensor.sum().item() == 0
    return message


def starts_after_the_program_chose_spmd() -> tuple[bool, str]:
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    torch.zeros(3, device="xla")
    message = message_of(get_runtime().start, spmd=False)
    get_runtime().start(spmd=True)
    return get_runtime().is_spmd, message


def trains_after_a_backward_on_the_host() -> tuple[list[float], list[float]]:
    host = torch.tensor([1.0, 2.0], requires_grad=True)
    (host * host).sum().backward()
    get_runtime().start(spmd=True)
    return host.grad.tolist(), _gradient(get_runtime().device)


def trains_on_other_threads_too() -> list[float]:
    """Where no backward was before, autograd's own threads find the device."""
    get_runtime().start(spmd=True)
    assert torch.autograd.is_multithreading_enabled()
    return _gradient(get_runtime().device)


def _gradient(device: torch.device) -> list[float]:
    leaf = torch.tensor([1.0, 2.0]).to(device).requires_grad_()
    (leaf * leaf).sum().backward()
    return leaf.grad.tolist()


def counts_devices() -> tuple[tuple[int, int], bool, tuple[int, int]]:
    import torch_xla

    before = get_runtime().count_devices()
    is_initialized = torch_xla._XLAC._xla_runtime_is_initialized()
    get_runtime().start(spmd=True)
    return before, is_initialized, get_runtime().count_devices()


def drives_one_device() -> dict[str, Any]:
    runtime = get_runtime()
    runtime.start(spmd=False)
    value = torch.tensor([1.0, 2.0]).to(runtime.device)
    runtime.sum_over_devices(value)
    gathered = runtime.gather_over_devices(value > 1)
    runtime.sync()
    return {
        "modes": (runtime.is_started, runtime.is_spmd, runtime.connects_processes),
        "devices": (runtime.num_devices, runtime.num_local_devices, runtime.ordinal),
        "sum": value.tolist(),
        "gathered": gathered.tolist(),
        "gradient": _gradient(runtime.device),
    }


def drives_several_without_spmd() -> str:
    return message_of(get_runtime().start, spmd=False)


def is_one_of_two_processes() -> tuple[bool, str, str, dict[str, str]]:
    runtime = get_runtime()
    runtime.start(spmd=False, local_rank=1, local_size=2, num_processes=2)
    value = torch.ones(2, device=runtime.device)
    variables = {name: os.environ[name] for name in ("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")}
    return (
        runtime.connects_processes,
        message_of(runtime.sum_over_devices, value),
        message_of(runtime.gather_over_devices, value),
        variables,
    )


def joins_too_late() -> str:
    import torch_xla.runtime

    torch_xla.runtime.global_runtime_device_count()
    return message_of(get_runtime().start, spmd=False, local_size=2)


def programs_of_collectives() -> list[str]:
    """Return the compiler's input of a sum and a gathering over 4 devices: XLA can't run it on virtual ones."""
    import torch_xla
    import torch_xla.core.xla_model as xla_model

    runtime = get_runtime()
    device = torch_xla.device()
    xla_model.set_replication(device, xla_model.get_xla_supported_devices())
    values = [torch.ones(2, device=device, dtype=dtype) * 2 for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    for value in values:
        runtime.sum_over_devices(value)
    values += [runtime.gather_over_devices(torch.ones(3, device=device) > index) for index in range(2)]
    assert values[-1].shape == (4, 3)
    return [torch_xla._XLAC._get_xla_tensors_hlo([value]) for value in values]


def keeps_programs(path: str) -> tuple[list[str], int, str]:
    runtime = get_runtime()
    runtime.start(spmd=True, cache_path=path)
    result = int((torch.arange(7, device=runtime.device) * 3).sum().item())
    late = message_of(runtime._use_cache, Path(path))
    return [file.name for file in Path(path).iterdir()], result, late


def owners_are_neighbours() -> list[int]:
    """Return the order of replicas if XLA numbers the devices of two hosts alternately."""
    runtime = get_runtime()
    runtime.start(spmd=True)
    cls = type(runtime)

    class TwoHosts(cls):
        process_count = 2

    class Native:
        """Gathers what each host would bring."""

        def _global_tensor_from_cpu_shards(self, shards: list[torch.Tensor], sharding: Any) -> torch.Tensor:
            assert [shard.tolist() for shard in shards] == [[0]] * 4
            return torch.tensor([0, 1, 0, 1])

    found = TwoHosts.__new__(TwoHosts)
    found.__dict__.update(runtime.__dict__, _native=Native())
    found.__dict__.pop("_order", None)
    return found._order
