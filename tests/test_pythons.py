"""With which Pythons `make test-pythons` runs the tests; the Pythons and make are replaced."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "test_pythons.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("pythons", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return folder


def program(path, line):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_versions_are_those_of_the_metadata(script):
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"Programming Language :: Python :: {version}"' in metadata for version in script.VERSIONS)
    assert metadata.count("Programming Language :: Python :: 3.") == len(script.VERSIONS)


def test_a_python_on_the_path_comes_first_if_it_can_be_started(script, bin_folder, tmp_path):
    of_pyenv = program(tmp_path / "pyenv" / "versions" / "3.12.4" / "bin" / "python", "echo 3.12")
    on_path = program(bin_folder / "python3.12", "echo 3.12")
    assert script.find("3.12") == on_path
    program(bin_folder / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    assert script.find("3.12") == of_pyenv
    assert script.find("3.1") is None


def test_each_python_has_an_environment_of_its_own(script, bin_folder, capfd):
    for version in ("3.10", "3.12"):
        program(bin_folder / f"python{version}", f"echo {version}")
    program(bin_folder / "make", 'echo "make $*"')
    assert script.main(["test"]) == 0
    printed = capfd.readouterr().out
    assert f"make VENV=.venv-3.10 PYTHON={bin_folder}/python3.10 test\n" in printed
    assert printed.endswith(
        "Python 3.10: passed\nPython 3.11: is not installed\nPython 3.12: passed\nPython 3.13: is not installed\n"
    )


def test_a_failure_does_not_keep_the_others_from_running(script, bin_folder, capfd):
    for version in ("3.10", "3.12"):
        program(bin_folder / f"python{version}", f"echo {version}")
    program(bin_folder / "make", 'case "$1" in *3.10) exit 2;; esac')
    assert script.main(["test", "3.10", "3.12"]) == 1
    assert capfd.readouterr().out.endswith("Python 3.10: FAILED\nPython 3.12: passed\n")


def test_a_version_that_is_asked_for_must_be_there(script, bin_folder):
    program(bin_folder / "python3.12", "echo 3.12")
    program(bin_folder / "make", "exit 0")
    assert script.main(["test", "3.12"]) == 0
    assert script.main(["test", "3.12", "3.13"]) == 1
