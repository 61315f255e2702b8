"""What ``torch.standin`` is: the functions that programs expect of ``torch.cuda`` and its like."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

NAME = "standin"
Event = torch.Event
#: One for each device, as ``torch.cuda`` has them; they are there when the accelerator is loaded.
default_generators: tuple[torch.Generator, ...] = ()


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Any:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> Any:
    return contextlib.nullcontext() if stream is None else stream


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Any = None) -> Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: Tensor, device: Any = None) -> None:
    default_generators[_index(device)].set_state(new_state)


def _index(device: Any) -> int:
    if device is None or isinstance(device, int):
        return current_device() if device is None else device
    index = torch.device(device).index
    return current_device() if index is None else index
