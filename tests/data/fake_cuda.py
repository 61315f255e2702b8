"""CUDA devices that are not there: streams that do their work as late as they may, and a memory of what was asked.

A copy's target holds garbage until some stream waits for an event behind the copy. A copy from pinned memory reads its
source only then, one from other memory before it returns, as CUDA has it.
"""

import contextlib
from collections import deque

import torch
from torch.overrides import TorchFunctionMode

GARBAGE = 77


class FakeCuda(TorchFunctionMode):
    """Stands in for ``torch.cuda`` and, while entered, for what tensors do with CUDA devices.

    ``record_stream`` is to be put in the place of the tensors' method, whose arguments C++ checks before modes see it.
    """

    def __init__(self):
        super().__init__()
        self.copies = []  # (device, stream, whether the source was pinned)
        self.recorded = []  # (data pointer, stream)
        self.num_pinned = 0
        self.num_streams = 0
        self.fail_copy = None
        self._current = {}
        self._devices = {}
        self._pinned = {}

    def Stream(self, device):
        self.num_streams += 1
        return FakeStream(f"side {self.num_streams}", device)

    def current_stream(self, device):
        return self._current.setdefault(device, FakeStream("default", device))

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream(stream.device)
        self._current[stream.device] = stream
        try:
            yield
        finally:
            self._current[stream.device] = before

    def record_stream(self, tensor, stream):
        self.recorded.append((tensor.data_ptr(), stream))

    def on_device(self, tensor, device):
        self._devices[id(tensor)] = (tensor, torch.device(device))  # kept, so that its id stays its own
        return tensor

    def pinned(self, tensor):
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        tensor = args[0] if args else None
        if func == torch.Tensor.device.__get__ and id(tensor) in self._devices:
            return self._devices[id(tensor)][1]
        if func is torch.Tensor.pin_memory:
            self.num_pinned += 1
            return self.pinned(tensor.clone())
        if func is torch.Tensor.is_pinned:
            return self._is_pinned(tensor)
        if func is torch.Tensor.to and [getattr(value, "type", None) for value in args[1:]] == ["cuda"]:
            return self._copy(tensor, args[1], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _copy(self, source, device, non_blocking=False):
        if self.fail_copy is not None and len(self.copies) == self.fail_copy:
            raise torch.OutOfMemoryError("CUDA out of memory (a fake one)")
        assert non_blocking
        is_plain = source.layout is torch.strided and not source.is_nested
        is_pinned = is_plain and self._is_pinned(source)
        self.copies.append((device, self.current_stream(device), is_pinned))
        if not is_plain:
            return self.on_device(source.clone(), device)
        target = self.on_device(torch.full_like(source, GARBAGE), device)
        read = source if is_pinned else source.clone()
        self.current_stream(device).queue.append(lambda: target.copy_(read))
        return target


class FakeStream:
    def __init__(self, name, device):
        self.name = name
        self.device = device
        self.queue = deque()
        self.num_done = 0
        self.num_waits = 0

    def __repr__(self):
        return f"{self.name} of {self.device}"

    def record_event(self):
        return self, self.num_done + len(self.queue)

    def wait_event(self, event):
        other, position = event
        self.num_waits += 1
        while other.num_done < position:
            other.queue.popleft()()
            other.num_done += 1
