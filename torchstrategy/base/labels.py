"""Names for parts of a program in the traces of torch's profiler; nothing while none runs.

A label reads ``ts::KIND DETAIL``. The kinds are ``replica`` (a replica's function), ``function`` (one that came from a
coordinator), ``meet`` (a replica at a point where replicas meet), ``merge`` (what is done there for all), ``wait`` (for
other processes), ``move`` (data between processes) and ``input`` (reading the next batch). They nest: the innermost one
says what the time goes to.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import profiler
from torch.autograd import profiler as autograd_profiler
from typing_extensions import override

__all__ = ["label", "make_profiler"]

_NOTHING = contextlib.nullcontext()
#: The profiler of the library's that records, or is about to.
_begun: list[weakref.ref[profiler.profile]] = []


def label(kind: str, *detail: object) -> contextlib.AbstractContextManager[Any]:
    """Name what is done in a ``with`` block.

    Args:
        kind: what for, see above.
        detail: of what; becomes text only if a profiler runs.
    """
    if not autograd_profiler._is_profiler_enabled:  # of the process, whichever thread started it
        return _NOTHING
    return profiler.record_function(" ".join([f"ts::{kind}", *map(str, detail)]))


def make_profiler(**options: Any) -> profiler.profile:
    """Return a profiler of this process: of the GPU, if there is one, and of all threads, which replicas may run on.

    Args:
        options: those of ``torch.profiler.profile``, but for the activities.

    Raises:
        RuntimeError: by the profiler, where it would begin while another one records.
    """
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return _OnlyProfiler(activities=activities, experimental_config=all_threads, **options)


class _OnlyProfiler(profiler.profile):
    """Refuses to begin while another one records: torch would end that one's recording, and mix both."""

    _is_refused = False

    @override
    def prepare_trace(self) -> None:
        self._check()
        super().prepare_trace()

    @override
    def start_trace(self) -> None:
        self._check()
        super().start_trace()

    @override
    def stop_trace(self) -> None:
        if _begun and _begun[0]() is self:
            _begun.clear()
        super().stop_trace()

    @override
    def stop(self) -> None:
        if not self._is_refused:
            super().stop()

    def _check(self) -> None:
        other = _begun[0]() if _begun else None
        is_recording = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        self._is_refused = is_recording or (other is not None and other is not self)
        if self._is_refused:
            raise RuntimeError(
                "Another profiler of torch is recording, such as torch.profiler.profile, ts.profiler.Profile or "
                "TensorBoard(profile_batch=...), and there can be one at a time in a process. Use one of them, or end "
                "the other one before."
            )
        _begun[:] = [weakref.ref(self)]
