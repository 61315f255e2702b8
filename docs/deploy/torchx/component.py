"""A component for TorchX 0.7: `torchstrategy launch` on each host, with restarts on which all hosts agree.

torchx run -s local_cwd docs/deploy/torchx/component.py:train --nproc_per_node 2 -- recipes/fault_tolerant.py epochs=1
torchx run -s slurm docs/deploy/torchx/component.py:train --nnodes 2 --nproc_per_node 8 --gpu 8 -- train.py
"""

import shlex

from torchx import specs


def train(  # noqa: PLR0913 - TorchX makes options of them
    *arguments: str,
    nnodes: int = 1,
    nproc_per_node: int = 1,
    max_restarts: int = 3,
    port: int = 29400,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,
    image: str = "",
    name: str = "train",
    python: str = "python",
) -> specs.AppDef:
    """Train on some hosts, each of which has some processes.

    Args:
        arguments: the program and what it is given; options after a double dash
        nnodes: hosts
        nproc_per_node: processes of each host
        max_restarts: how often all processes start again after a failure, from the program's last checkpoint
        port: free on the first host, where the launchers meet
        cpu: cores of each host
        gpu: GPUs of each host
        memMB: memory of each host, in MB
        image: what the scheduler starts: a container's image, or a folder
        name: of the job
        python: the Python of all hosts
    """
    launch = [python, "-m", "torchstrategy", "launch", f"--nnodes={nnodes}", f"--nproc-per-node={nproc_per_node}"]
    launch += [f"--max-restarts={max_restarts}", f"--rdzv-id={specs.macros.app_id}"]
    # The scheduler names the first host in a variable, whose name takes the macro's place; `$$` is TorchX's `$`.
    endpoint = f'--rdzv-endpoint="$${{{specs.macros.rank0_env}:-localhost}}:{port}"' if nnodes > 1 else ""
    command = f"exec {shlex.join(launch)} {endpoint} {shlex.join(arguments)}"
    role = specs.Role(
        name="host",
        image=image,
        entrypoint="bash",
        args=["-c", command],
        num_replicas=nnodes,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB),
        port_map={"launch": port},
    )
    return specs.AppDef(name=name, roles=[role])
