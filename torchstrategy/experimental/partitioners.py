"""Into how many shards ``ParameterServerStrategy`` cuts a variable."""

from torchstrategy.ps.partitioning import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
