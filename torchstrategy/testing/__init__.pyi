from torchstrategy.testing.local_cluster import LocalCluster as LocalCluster
from torchstrategy.testing.processes import Outcome as Outcome
from torchstrategy.testing.processes import ProcessPool as ProcessPool
from torchstrategy.testing.processes import RemoteError as RemoteError
from torchstrategy.testing.processes import run_in_processes as run_in_processes
from torchstrategy.testing.verification.api import VerificationReport as VerificationReport
from torchstrategy.testing.verification.api import verify_replication as verify_replication
