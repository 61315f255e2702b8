"""Install torch-xla and the torch that it is built for, for the Python that runs this file.

Nothing of torch-xla's metadata says which torch it needs, so pip would keep any. The pair lives in an environment of
its own, because the rest of the project is tested with a newer torch.
"""

import importlib.metadata
import subprocess
import sys

PAIR = {"torch": "2.9.1", "torch-xla": "2.9.0"}
PYTHONS = ((3, 10), (3, 13))


def main() -> int:
    """Install what is missing; return pip's exit code."""
    if not sys.platform.startswith("linux"):
        print(f"There is no torch-xla for {sys.platform}: it is there for Linux only.")
        return 1
    oldest, newest = PYTHONS
    if not oldest <= sys.version_info[:2] <= newest:
        print(f"There is no torch-xla {PAIR['torch-xla']} for Python {sys.version.split()[0]}: it needs 3.10 to 3.13.")
        print("Try: make PYTHON=python3.12 test-tpu")
        return 1
    wanted = [f"{name}=={version}" for name, version in PAIR.items() if _installed(name) != version]
    if not wanted:
        return 0
    print(f"Installing {' and '.join(wanted)}, which takes some minutes and 7 GB", flush=True)
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=False).returncode


def _installed(name: str) -> str | None:
    """Return the version that is installed, without its local part: a build for CPUs will do."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
