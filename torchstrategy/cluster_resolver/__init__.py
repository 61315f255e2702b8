"""Which tasks a cluster has, and which of them this process is, under the names of ``tf.distribute.cluster_resolver``.

A resolver reads a description of the cluster; strategies take it as ``cluster_resolver``.
"""

from torchstrategy.cluster_resolver.base import ClusterResolver
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.detect import explain, find_job
from torchstrategy.cluster_resolver.gce import GCEClusterResolver
from torchstrategy.cluster_resolver.job import Job
from torchstrategy.cluster_resolver.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
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
