"""Install torch for the Python that runs this file: a CPU build where there is no NVIDIA GPU.

The wheels that package indexes offer for Linux bring several gigabytes of CUDA libraries. A CPU build of the same
version has the local version label ``+cpu``; pip finds it on PyTorch's own index or wherever pip is configured to look.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

OLDEST_PYTHON = (3, 10)
OLDEST = (2, 9)
PINNED = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    """Install torch unless a recent enough one is there; return pip's exit code."""
    if sys.version_info < OLDEST_PYTHON:
        print(f"Python {sys.version} is too old: 3.10 or newer is needed. Try: make PYTHON=python3.12 ...")
        return 1
    if _is_installed():
        return 0
    if not sys.platform.startswith("linux") or _has_nvidia_gpu():
        return _pip_install(PINNED)
    if _pip_install(PINNED + "+cpu", quiet=True) == 0:
        return 0
    if _is_reachable(CPU_INDEX + "/torch/") and _pip_install(PINNED + "+cpu", "--extra-index-url", CPU_INDEX) == 0:
        return 0
    print(f"No CPU build of torch {PINNED} was found, neither where pip is configured to look nor at {CPU_INDEX}.")
    print("Installing the ordinary build, which may bring CUDA libraries that this machine can't use.")
    return _pip_install(PINNED)


def _is_installed() -> bool:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= OLDEST


def _has_nvidia_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    result = subprocess.run([program, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return result.returncode == 0 and b"GPU" in result.stdout


def _is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _pip_install(version: str, *options: str, quiet: bool = False) -> int:
    print(f"Installing torch {version}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "torch==" + version, *options]
    # Not finding the first choice is no error worth showing: the next one follows.
    errors = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, stderr=errors, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
