"""A plain DDP script: ``ddp_script.py EXAMPLES BATCH SAMPLER``; the batch is a share of the global one, or its own."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    examples, batch, sampler = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(examples, 6), torch.arange(examples) % 2)
    loader = DataLoader(
        data,
        batch_size=4 // size if batch == "share" else 4,
        sampler=DistributedSampler(data) if sampler == "padded" else range(rank, examples, size),
    )
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
