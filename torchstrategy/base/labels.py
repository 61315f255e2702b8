"""Names for parts of a program in the traces of torch's profiler; nothing while none runs.

A label reads ``ts::KIND DETAIL``. The kinds are ``replica`` (a replica's function), ``function`` (one that came from a
coordinator), ``meet`` (a replica at a point where replicas meet), ``merge`` (what is done there for all), ``wait`` (for
other processes), ``move`` (data between processes) and ``input`` (reading the next batch). They nest: the innermost one
says what the time goes to.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import profiler
from torch.autograd import profiler as autograd_profiler

__all__ = ["label", "make_profiler"]

_NOTHING = contextlib.nullcontext()


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
    """
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profiler.profile(activities=activities, experimental_config=all_threads, **options)
