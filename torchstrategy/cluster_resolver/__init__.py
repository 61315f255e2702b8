"""Which tasks a cluster has, and which of them this process is, under the names of ``tf.distribute.cluster_resolver``.

A resolver reads a description of the cluster; strategies take it as ``cluster_resolver``.
"""

from __future__ import annotations

import typing

from torchstrategy.base import later

if typing.TYPE_CHECKING:
    from torchstrategy.base.job import Job
    from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
    from torchstrategy.cluster_resolver.detect import explain, find_job
    from torchstrategy.cluster_resolver.gce import GCEClusterResolver
    from torchstrategy.cluster_resolver.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
    from torchstrategy.cluster_resolver.resolver import ClusterResolver
    from torchstrategy.cluster_resolver.simple import SimpleClusterResolver, UnionResolver
    from torchstrategy.cluster_resolver.slurm import SlurmClusterResolver
    from torchstrategy.cluster_resolver.tf_config import TFConfigClusterResolver
    from torchstrategy.cluster_resolver.torchrun import TorchrunClusterResolver
    from torchstrategy.cluster_resolver.tpu import TPUClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "Job",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
    "explain",
    "find_job",
]

#: Strategies use a few of these modules; all together are 1 MB of each process.
_LATER = {
    "ClusterResolver": "torchstrategy.cluster_resolver.resolver",
    "ClusterSpec": "torchstrategy.cluster_resolver.cluster_spec",
    "GCEClusterResolver": "torchstrategy.cluster_resolver.gce",
    "Job": "torchstrategy.base.job",
    "KubernetesClusterResolver": "torchstrategy.cluster_resolver.kubernetes",
    "KubernetesExecutableLocation": "torchstrategy.cluster_resolver.kubernetes",
    "SimpleClusterResolver": "torchstrategy.cluster_resolver.simple",
    "SlurmClusterResolver": "torchstrategy.cluster_resolver.slurm",
    "TFConfigClusterResolver": "torchstrategy.cluster_resolver.tf_config",
    "TPUClusterResolver": "torchstrategy.cluster_resolver.tpu",
    "TorchrunClusterResolver": "torchstrategy.cluster_resolver.torchrun",
    "UnionResolver": "torchstrategy.cluster_resolver.simple",
    "explain": "torchstrategy.cluster_resolver.detect",
    "find_job": "torchstrategy.cluster_resolver.detect",
}

if not typing.TYPE_CHECKING:
    __getattr__, __dir__ = later.import_later(__name__, _LATER)
