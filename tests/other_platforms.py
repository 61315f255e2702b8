"""A process of Windows or of macOS as far as Linux can play it: what Python does not have there is gone.

``python -m tests.other_platforms win32`` (or ``darwin``) imports every module of the library, trains on two replicas in
the process, and saves and restores.
"""

import asyncio  # noqa: F401 - what the standard library and torch need of the platform, they look for first
import ctypes
import functools
import importlib
import os
import pkgutil
import select
import selectors
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile

import torch
import torch._dynamo
import torch.distributed.run
import torch.utils.tensorboard
import torchmetrics  # noqa: F401

#: What neither Windows nor macOS have, by module.
LINUX_ONLY = {
    os: [
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fallocate", "posix_fadvise", "pidfd_open"),
        *("eventfd", "splice", "copy_file_range", "getrandom"),
    ],
    socket: ["SO_PEERCRED", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SOCK_CLOEXEC", "SOCK_NONBLOCK"],
    signal: ["SIGRTMIN", "SIGRTMAX", "SIGPWR"],
}
#: What Windows does not have beside it.
POSIX_ONLY = {
    os: [
        *(
            "fork",
            "forkpty",
            "register_at_fork",
            "getuid",
            "geteuid",
            "getgid",
            "getegid",
            "getpgid",
            "getpgrp",
            "setsid",
        ),
        *("killpg", "statvfs", "fstatvfs", "pread", "pwrite", "preadv", "pwritev", "sysconf", "uname", "getloadavg"),
        *("waitid", "wait", "wait3", "wait4", "WNOHANG", "nice", "fdatasync", "fchmod", "fchown", "chown", "mkfifo"),
        *("O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC", "O_DSYNC", "set_blocking", "sync"),
        *("posix_spawn", "sched_yield", "ctermid", "getgroups", "getpriority", "setpriority"),
    ],
    socket: ["AF_UNIX", "SO_REUSEPORT", "MSG_DONTWAIT", "MSG_NOSIGNAL", "SCM_RIGHTS"],
    signal: [
        *("SIGKILL", "SIGSTOP", "SIGCONT", "SIGTSTP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGCHLD"),
        *("SIGPIPE", "SIGWINCH", "SIGBUS", "SIGTTIN", "SIGTTOU", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGXFSZ", "SIGIO"),
        *("setitimer", "getitimer", "ITIMER_REAL", "alarm", "pause", "siginterrupt", "pthread_kill", "pthread_sigmask"),
        *("sigwait", "sigtimedwait", "sigpending", "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK"),
    ],
}
POSIX_MODULES = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "posix"]


def hide(platform: str) -> None:
    """Take away what the platform does not have, from the library only: all others have been imported."""
    socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)  # on Windows of another family
    for names in (LINUX_ONLY, POSIX_ONLY)[: 2 if platform == "win32" else 1]:
        for module, absent in names.items():
            for name in absent:
                if hasattr(module, name):
                    delattr(module, name)
    if platform == "win32":
        sys.modules.update(dict.fromkeys(POSIX_MODULES))
        ctypes.CDLL = _no_c_library
        for name in ("sendmsg", "recvmsg", "recvmsg_into"):
            setattr(socket.socket, name, _Absent())
        del select.poll, selectors.PollSelector
    sys.platform = platform


class _Absent:
    def __get__(self, instance, owner):
        raise AttributeError("A socket of Windows does not have this")


def _no_c_library(name, *arguments, **options):
    raise TypeError(f"There is no library {name!r} here")  # what CDLL(None) raises on Windows


def import_all() -> int:
    """Import every module of the library; return how many there are."""
    import torchstrategy  # noqa: PLC0415 - what is hidden must be so before

    needs_others = ("torch_xla", "kubernetes", "googleapiclient", "google", "ray")
    count = 0
    for module in pkgutil.walk_packages(torchstrategy.__path__, "torchstrategy."):
        if module.name == "torchstrategy.__main__":
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in needs_others:
                raise
        count += 1
    return count


def train() -> None:
    """Train on two replicas, in turns and at once, with ``run`` and with ``fit``, and restore a checkpoint."""
    import torchstrategy as ts  # noqa: PLC0415

    dataset = ts.data.Dataset.from_tensor_slices((torch.ones(8, 3), torch.ones(8, 1))).batch(4)
    for concurrent in (False, True):
        strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=concurrent)
        with strategy.scope():
            model = ts.Model(torch.nn.Linear(3, 1))
        model.compile(optimizer="sgd", loss="mse")
        losses = model.fit(dataset, epochs=3, verbose=0).history["loss"]
        assert losses[-1] < losses[0]
        before = float(next(model.parameters()).detach().sum())
        with tempfile.TemporaryDirectory() as folder:
            manager = ts.train.CheckpointManager(ts.train.Checkpoint(model=model), folder, max_to_keep=2)
            manager.save()
            with torch.no_grad():
                next(model.parameters()).zero_()
            manager.restore_or_initialize()
        assert float(next(model.parameters()).detach().sum()) == before


def use_server() -> None:
    """Train with a parameter server and a worker, all in this process."""
    import torchstrategy as ts  # noqa: PLC0415
    from torchstrategy.base.addresses import ReservedPorts  # noqa: PLC0415

    ports = ReservedPorts(3)
    chief, ps, worker = (f"127.0.0.1:{port}" for port in ports.numbers)
    cluster = ts.cluster_resolver.ClusterSpec({"chief": [chief], "ps": [ps], "worker": [worker]})
    ports.close()
    servers = [ts.Server(cluster, job_name=job, task_index=0) for job in ("ps", "worker")]
    resolver = ts.cluster_resolver.SimpleClusterResolver(cluster, task_type="chief", task_id=0)
    strategy = ts.ParameterServerStrategy(resolver)
    with strategy.scope():
        large, small = ts.Variable(torch.zeros(1 << 20)), ts.Variable(torch.zeros(3))
    coordinator = ts.coordinator.ClusterCoordinator(strategy)

    def add() -> None:
        for variable in (large, small):
            variable.assign_add(torch.ones(variable.shape))

    coordinator.schedule(add)
    coordinator.join()
    assert large.sum().item() == 1 << 20
    assert small.tolist() == [1.0] * 3
    strategy.close()
    for server in servers:
        server.stop()


if __name__ == "__main__":
    hide(sys.argv[1])
    print(f"{import_all()} modules")
    train()
    use_server()
    print("trained")
