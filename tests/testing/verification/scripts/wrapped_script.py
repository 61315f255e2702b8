"""Trains under Fabric, Accelerate, or a stand-in that wraps as they do: ``wrapped_script.py LIBRARY EXAMPLES``."""

import importlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Wrapper(nn.Module):
    """As ``_FabricModule``: keeps the module and what is called."""

    __module__ = "lightning_fabric.wrappers"

    def __init__(self, called, original):
        super().__init__()
        self._forward_module = called
        self._original_module = original

    def forward(self, *args):
        return self._forward_module(*args)


class WrappedOptimizer:
    """As ``_FabricOptimizer`` and ``AcceleratedOptimizer``: not one of torch's, but has one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        return self.optimizer.step()


class StandIn:
    """Prepares only where there are several processes, so that one has its own loader and module."""

    def __init__(self):
        dist.init_process_group("gloo")
        self.size = dist.get_world_size()
        self.backward = torch.Tensor.backward

    def prepare(self, model, optimizer, data, batch):
        loader = DataLoader(data, batch)
        called = model
        if self.size > 1:
            called = DistributedDataParallel(model)
            loader = DataLoader(loader.dataset, loader.batch_size, sampler=DistributedSampler(data, shuffle=False))
        return Wrapper(called, model), WrappedOptimizer(optimizer), loader


class WithFabric:
    def __init__(self):
        fabric = importlib.import_module("lightning_fabric").Fabric(
            accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp"
        )
        fabric.launch()
        self.size, self.backward, self.fabric = fabric.world_size, fabric.backward, fabric

    def prepare(self, model, optimizer, data, batch):
        return *self.fabric.setup(model, optimizer), self.fabric.setup_dataloaders(DataLoader(data, batch))


class WithAccelerate:
    def __init__(self):
        accelerator = importlib.import_module("accelerate").Accelerator()
        self.size, self.backward, self.prepared = accelerator.num_processes, accelerator.backward, accelerator.prepare

    def prepare(self, model, optimizer, data, batch):
        return self.prepared(model, optimizer, DataLoader(data, batch))


def main():
    library = {"stand-in": StandIn, "lightning_fabric": WithFabric, "accelerate": WithAccelerate}[sys.argv[1]]()
    examples = int(sys.argv[2])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(examples, 6), torch.arange(examples) % 2)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer, loader = library.prepare(model, optimizer, data, 4 // library.size)
    for inputs, labels in loader:
        optimizer.zero_grad()
        library.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()


if __name__ == "__main__":
    main()
