"""Run `make test` with each Python that is installed, in an environment of its own: `.venv-3.10` and so on."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def main(arguments: Sequence[str]) -> int:
    """Run a target of make for each version; return 0 if there is one and all have passed.

    Args:
        arguments: the target, and versions such as ``3.12``; without any, all versions.
    """
    target, *versions = arguments
    results = {}
    for version in versions or VERSIONS:
        python = find(version)
        if python is None:
            results[version] = "is not installed"
            continue
        print(f"=== Python {version}: {python}", flush=True)
        command = ["make", f"VENV=.venv-{version}", f"PYTHON={python}", target]
        results[version] = "passed" if subprocess.run(command, check=False).returncode == 0 else "FAILED"
    for version, result in results.items():
        print(f"Python {version}: {result}")
    wanted = {"passed"} if versions else {"passed", "is not installed"}
    return 0 if "passed" in results.values() and set(results.values()) <= wanted else 1


def find(version: str) -> str | None:
    """Return the first Python of a version on PATH or among pyenv's that can be started; `None` if there is none."""
    for python in _candidates(version):
        command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError:
            continue
        if printed.strip() == version:  # pyenv's shims are there for versions that are switched off, too
            return python
    return None


def _candidates(version: str) -> Iterator[str]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from (str(folder / "bin" / "python") for folder in sorted(root.glob(f"versions/{version}.*"), reverse=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
