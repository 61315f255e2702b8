"""``TpuRuntime`` over torch_xla."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.xla.interface import TpuRuntime
from torchstrategy.xla.kernels import show_parts

__all__ = ["TorchXlaRuntime"]

_REPLICA = "replica"
_HARDWARE = "PJRT_DEVICE"
_REPLICATED = "{replicated}"
_MAX_DIMS = 5


class TorchXlaRuntime(TpuRuntime):
    """The runtime of torch_xla, with one mesh axis: the replicas."""

    def __init__(self) -> None:
        self.is_requested = _HARDWARE in os.environ  # torch_xla sets it when it is imported
        if "torch_xla" not in sys.modules:
            # XLA's C++ code warns at each compilation of what torch_xla, not its user, should do otherwise.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        with _root_logger_untouched():
            import torch_xla
        import torch_xla.core.xla_model as xla_model
        import torch_xla.debug.metrics as metrics
        import torch_xla.distributed.spmd as spmd
        import torch_xla.runtime as runtime

        # Torch_xla puts a GRU of its own there, which no mode sees, and which a host without torch_xla can't load.
        torch.nn.GRU = getattr(torch.nn.GRU, "_orig", torch.nn.GRU)  # type: ignore[misc]
        # And a function that reads numbers, refuses `foreach=True`, and does both for tensors of the host as well.
        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_
        self._xla: Any = torch_xla
        self._native: Any = torch_xla._XLAC
        self._model: Any = xla_model
        self._metrics: Any = metrics
        self._spmd: Any = spmd
        self._runtime: Any = runtime
        self._is_spmd: bool | None = None
        self._num_processes = 1
        self.name = f"torch_xla {torch_xla.__version__}"
        self.is_requested = self.is_requested or self.hardware == "TPU"

    @override
    def start(
        self,
        *,
        spmd: bool,
        local_rank: int = 0,
        local_size: int = 1,
        num_processes: int = 1,
        cache_path: str | Path | None = None,
    ) -> None:
        if self.is_started:
            if self.is_spmd != spmd:
                raise RuntimeError(
                    f"{self.name} is running {_mode(spmd=self.is_spmd)} and can't change to {_mode(spmd=spmd)}: "
                    "that is decided once for each process. Start the program again."
                )
            return
        num_processes = 1 if spmd else max(num_processes, local_size)
        self._check_in_time(spmd=spmd, num_processes=num_processes)
        if cache_path is not None:
            self._use_cache(Path(cache_path))
        if not spmd:
            self._join_processes(local_rank, local_size, num_processes)
        elif not self._runtime.is_spmd():
            self._runtime.use_spmd()
        show_parts()
        self._touch_devices()
        self._is_spmd, self._num_processes = spmd, num_processes

    def _check_in_time(self, *, spmd: bool, num_processes: int) -> None:
        used_otherwise = self._native._xla_get_spmd_config_is_locked() and not self._runtime.is_spmd()
        if spmd and used_otherwise:
            raise RuntimeError(
                f"{self.name} was used for one device before it could be started for all devices of this process. Call "
                "ts.tpu.experimental.initialize_tpu_system() before the first tensor is made on an XLA device, and "
                "before torch_xla.device()."
            )
        if not spmd and self._runtime.is_spmd():
            raise RuntimeError(
                f"{self.name} was started for all devices of this process (XLA_USE_SPMD, torch_xla.runtime.use_spmd), "
                "but the job has a process for each device. Unset the variable, or remove the call."
            )
        if num_processes > 1 and self._native._xla_runtime_is_initialized():
            raise RuntimeError(
                f"{self.name} was started before it could be told which device is this process's. Call "
                "ts.tpu.experimental.initialize_tpu_system() before anything else that uses torch_xla."
            )

    def _use_cache(self, path: Path) -> None:
        if self._native._xla_computation_cache_is_initialized():
            raise RuntimeError(
                f"The compilation cache {path} comes too late: a program was compiled before. Call "
                "ts.tpu.experimental.initialize_tpu_system(cache_path=...) before anything is computed on XLA devices."
            )
        path.mkdir(parents=True, exist_ok=True)
        self._runtime.initialize_cache(str(path))

    def _join_processes(self, local_rank: int, local_size: int, num_processes: int) -> None:
        """Take one device for this process, and learn of the others; as torch_xla does under a launcher."""
        from torch_xla._internal import pjrt

        if num_processes == 1:
            pjrt.initialize_singleprocess()
        else:
            pjrt.initialize_multiprocess(local_rank, local_size)
        here, everywhere = self._runtime.addressable_device_count(), self._runtime.global_device_count()
        if here != 1:
            raise RuntimeError(
                f"This process drives {here} devices, but in a job with one process for each device it must be one. "
                "Virtual devices: set CPU_NUM_DEVICES=1. TPU v2 and v3 have two devices on a chip: start one process "
                "for each host instead, without a launcher."
            )
        if self.hardware == "TPU" and everywhere != num_processes:
            raise RuntimeError(
                f"The job has {num_processes} processes, but the TPU has {everywhere} devices. Start one process for "
                "each device, or one for each host without a launcher, which drives all devices of the host."
            )

    def _touch_devices(self) -> None:
        """Make sure that a backward pass finds a queue for the device: autograd counts devices once, at its first."""
        self._native._xla_num_runtime_devices()
        with torch.enable_grad():
            leaf = torch.zeros((), device=self.device, requires_grad=True)
            try:
                (leaf * 1.0).backward()  # type: ignore[no-untyped-call]
            except RuntimeError:
                # A backward pass on another device was first. Without threads it needs no queues.
                torch.autograd.set_multithreading_enabled(False)

    @property
    @override
    def is_started(self) -> bool:
        return self._is_spmd is not None

    @property
    @override
    def is_spmd(self) -> bool:
        return bool(self._is_spmd)

    @property
    @override
    def device(self) -> torch.device:
        return torch.device(str(self._xla.device()))

    @property
    @override
    def hardware(self) -> str:
        return str(self._runtime.device_type())

    @property
    @override
    def num_devices(self) -> int:
        return int(self._runtime.global_runtime_device_count())

    @property
    @override
    def num_local_devices(self) -> int:
        return int(self._runtime.addressable_runtime_device_count())

    @property
    @override
    def process_index(self) -> int:
        return int(self._runtime.process_index())

    @property
    @override
    def process_count(self) -> int:
        return int(self._runtime.process_count())

    @override
    def count_devices(self) -> tuple[int, int]:
        if self.is_started:
            return self.num_devices, self.num_local_devices
        if self.hardware == "TPU":
            from torch_xla._internal import tpu

            return int(tpu.num_expected_global_devices()), int(tpu.num_available_devices())
        count = int(os.environ.get("CPU_NUM_DEVICES", "1"))
        return count, count

    @override
    def device_coordinates(self) -> list[list[int]]:
        found = []
        every = self._runtime.global_runtime_device_attributes()
        for index in self._order if self.is_spmd else range(len(every)):
            attributes = every[index]
            coordinates = [int(number) for number in attributes.get("coords", (index, 0, 0))]
            found.append([*coordinates, int(attributes.get("core_on_chip", 0))])
        return found

    @functools.cached_property
    def _order(self) -> list[int]:
        """The devices in the order of replicas: those of one process are neighbours, whatever XLA's numbers are."""
        indices = list(range(self.num_devices))
        if self.process_count == 1:
            return indices
        own = [torch.tensor([self.process_index])] * self.num_local_devices
        in_xla_order = self._spmd.Mesh(indices, (len(indices),), (_REPLICA,)).get_op_sharding((_REPLICA,))
        owners = self._native._global_tensor_from_cpu_shards(own, in_xla_order).cpu().tolist()
        return sorted(indices, key=owners.__getitem__)

    @functools.cached_property
    def _mesh(self) -> Any:
        return self._new_mesh((self.num_devices,), (_REPLICA,))

    @functools.cached_property
    def _manual(self) -> Any:
        return self._native.OpSharding([], [], [], self._spmd.ShardingType.MANUAL)

    def _sharding(self, num_dims: int, *, split: bool) -> Any:
        """Return the sharding of the first dimension, or that of values which are whole everywhere."""
        return self._mesh.get_op_sharding((_REPLICA, *[None] * (num_dims - 1)) if split else ())

    def _new_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        return self._spmd.Mesh(self._order, shape, names)

    @override
    def enter(self, value: Tensor, *, split: bool) -> Tensor:
        if split:
            self._check_divisible(value)
        # What the functions of torch_xla.distributed.spmd do, which also look for jax at each call: half of the time.
        copy = _flat(_unmarked(value.detach())) if split else _unmarked(value.detach())
        self._native._xla_mark_sharding(copy, self._sharding(copy.dim(), split=split))
        local: Tensor = self._native._spmd_full_to_shard_shape(copy)
        return _shaped(local, (local.shape[0], *value.shape[1:])) if split else local

    @override
    def stack(self, value: Tensor) -> Tensor:
        row = _flat(torch.unsqueeze_copy(value.detach(), 0))
        self._native._mark_manual_sharding(row, self._manual)
        shape, sharding = (self.num_devices, *row.shape[1:]), self._sharding(row.dim(), split=True)
        stacked: Tensor = self._native._spmd_shard_to_full_shape(row, sharding, shape, row.dtype)
        return _shaped(stacked, (self.num_devices, *value.shape))

    @override
    def assign(self, target: Tensor, value: Tensor) -> None:
        self._native._replace_xla_tensor(target, value)

    @override
    def replicate(self, value: Tensor) -> Tensor:
        sharding = self._sharding_of(value)
        if sharding == _REPLICATED:
            return value
        whole = _unmarked(value.detach()) if sharding else value
        self._native._xla_mark_sharding(whole, self._sharding(whole.dim(), split=False))
        if whole is not value:
            with torch.no_grad():
                self._native._replace_xla_tensor(value, whole)
        return value

    @override
    def split(self, value: Tensor, partition: Sequence[int]) -> Tensor:
        num_parts = math.prod(partition)
        if len(partition) != value.dim() or num_parts < 1 or self.num_devices % num_parts:
            raise ValueError(
                f"A value of shape {tuple(value.shape)} can't be divided into {list(partition)} parts over "
                f"{self.num_devices} devices: there must be one number of parts for each dimension, and the devices a "
                "multiple of their product."
            )
        names = tuple(f"dim{dim}" for dim in range(len(partition)))
        mesh = self._new_mesh((*partition, self.num_devices // num_parts), (*names, _REPLICA))
        spec = tuple(name if parts > 1 else None for name, parts in zip(names, partition, strict=True))
        result: Tensor = self._spmd.mark_sharding_with_gradients(_unmarked(value), mesh, spec)
        return result

    @override
    def place(self, value: Tensor, index: int) -> Tensor:
        # torch_xla takes a sharding to one device for a replicated one.
        if not 0 <= index < self.num_devices:
            raise ValueError(f"There is no device {index}: there are {self.num_devices}, counted from 0.")
        return value

    @override
    def upload(self, parts: Sequence[Tensor]) -> Tensor:
        shapes = {(part.shape, part.dtype) for part in parts}
        if len(parts) != self.num_local_devices or len(shapes) != 1 or parts[0].dim() == 0:
            described = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
            raise ValueError(
                f"upload takes {self.num_local_devices} tensors of one shape [k, ...] and one dtype. Received: "
                f"{described}"
            )
        rows = [_flat(part) for part in parts]
        sharding = self._sharding(rows[0].dim(), split=True)
        result: Tensor = self._native._global_tensor_from_cpu_shards(rows, sharding)
        return _shaped(result, (result.shape[0], *parts[0].shape[1:]))

    @override
    def rows(self, stacked: Tensor) -> list[Tensor]:
        self._check_divisible(stacked)
        if self._native._check_tensor_need_materialization([stacked])[0]:
            self.sync()
        self._model.wait_device_ops()  # reading what is being computed raises
        height = stacked.shape[0] // self.num_devices
        if self._sharding_of(stacked):
            shards = [shard for shard, _ in self._native._get_local_shards([stacked])[0]]
            # The compiler may have split the result of a computation otherwise, or not at all.
            if all(shard.shape == (height, *stacked.shape[1:]) for shard in shards):
                places = [place for _, place in self._native._get_local_shard_replica_and_indices([stacked])[0]]
                starts = [place[0].start if isinstance(place, list) else 0 for place in places]
                return [shards[index] for index in sorted(range(len(shards)), key=starts.__getitem__)]
        first = self.process_index * self.num_local_devices * height
        whole = stacked.detach().cpu()[first : first + self.num_local_devices * height]
        return [whole[index * height : (index + 1) * height].clone() for index in range(self.num_local_devices)]

    def _check_divisible(self, value: Tensor) -> None:
        if value.dim() == 0 or value.shape[0] % self.num_devices:
            raise ValueError(
                f"A value of shape {tuple(value.shape)} can't be divided between {self.num_devices} replicas: its "
                "first dimension must be a multiple of that."
            )

    def _sharding_of(self, value: Tensor) -> str:
        return str(self._native._get_xla_sharding_spec(value))

    @property
    @override
    def ordinal(self) -> int:
        return int(self._runtime.global_ordinal())

    @property
    @override
    def connects_processes(self) -> bool:
        return self._num_processes in (1, self.num_devices)

    @override
    def sum_over_devices(self, value: Tensor) -> None:
        self._check_collective()
        self._model.all_reduce(self._model.REDUCE_SUM, [value])

    @override
    def gather_over_devices(self, value: Tensor) -> Tensor:
        self._check_collective()
        # With pinned layout it would be a sum of padded tensors, which booleans don't have.
        result: Tensor = self._model.all_gather(value.unsqueeze(0), pin_layout=False)
        return result

    def _check_collective(self) -> None:
        if self.is_spmd:
            # Inside a replica function such a collective returns its input.
            raise RuntimeError("Sums over devices by XLA's collectives need one process for each device; use stack().")
        if not self.connects_processes:
            raise RuntimeError(
                f"XLA does not connect the {self._num_processes} processes of this job: each has {self.hardware} "
                "devices of its own. Combine the values of the processes on their hosts."
            )

    @override
    def sync(self, *, wait: bool = False) -> None:
        self._xla.sync(wait=wait)

    @override
    def num_compilations(self) -> int:
        return int(self._metrics.counter_value("UncachedCompile") or 0)  # the metric CompileTime copies its samples

    @override
    def set_seed(self, seed: int) -> None:
        self._native._xla_set_rng_seed(seed, str(self.device))

    @override
    def get_seed(self) -> int:
        return int(self._native._xla_get_rng_seed(str(self.device))) % 2**64

    @override
    def shutdown(self) -> None:
        self._model.wait_device_ops()


@contextlib.contextmanager
def _root_logger_untouched() -> Iterator[None]:
    """Take away the handler that torch_xla gives the root logger when it is imported, and its remark on hardware."""
    root = logging.getLogger()
    before, disabled = list(root.handlers), logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = before


def _mode(*, spmd: bool) -> str:
    return "with all devices in one process" if spmd else "with one process for each device"


def _flat(value: Tensor) -> Tensor:
    """Return a value whose sharding on the first dimension can be noted: torch_xla can't for more than 5 dimensions."""
    return value if value.dim() <= _MAX_DIMS else _shaped(value, (value.shape[0], math.prod(value.shape[1:])))


def _shaped(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return value if value.shape == shape else torch.view_copy(value, shape)


def _unmarked(value: Tensor) -> Tensor:
    """Return the same value as a node of its own: a sharding is noted on the node, once, and a clone takes it along.

    Below autograd, in a dispatch mode, XLA has no views.
    """
    return torch.permute_copy(value, tuple(range(value.dim())))
