"""Which pair of torch and torch-xla `make test-tpu` installs; pip is replaced."""

import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "install_torch_xla.py"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("install_torch_xla", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install(script, monkeypatch):
    def install(installed=(), *, platform="linux", python=(3, 11, 7), code=0):
        installed, calls = dict(installed), []

        def version(name):
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        def run(command, *, check):
            calls.append(command[command.index("--quiet") + 1 :])
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(script.importlib.metadata, "version", version)
        monkeypatch.setattr(script.subprocess, "run", run)
        system = SimpleNamespace(platform=platform, version_info=python, version="3.x", executable="python")
        monkeypatch.setattr(script, "sys", system)
        return script.main(), calls

    return install


def test_both(install, script):
    assert install() == (0, [["torch==2.9.1", "torch-xla==2.9.0"]])
    assert script.PAIR == {"torch": "2.9.1", "torch-xla": "2.9.0"}


def test_what_is_there_stays(install, script):
    assert install(script.PAIR) == (0, [])
    assert install({"torch": "2.9.1+cpu"}) == (0, [["torch-xla==2.9.0"]])
    assert install({**script.PAIR, "torch": "2.13.0"}) == (0, [["torch==2.9.1"]])


def test_failure_is_reported(install):
    assert install(code=2)[0] == 2


@pytest.mark.parametrize(
    ("where", "said"),
    [({"platform": "darwin"}, "Linux only"), ({"python": (3, 14, 0)}, "3.10 to 3.13"), ({"python": (3, 9, 0)}, "3.10")],
)
def test_where_there_is_none(install, capsys, where, said):
    assert install(**where) == (1, [])
    assert said in capsys.readouterr().out


def test_the_extra_has_the_same_pair(script):
    releases = {name: ".".join(version.split(".")[:2]) for name, version in script.PAIR.items()}
    assert (
        f'tpu = ["torch=={releases["torch"]}.*", "torch-xla[tpu]=={releases["torch-xla"]}.*"]' in PYPROJECT.read_text()
    )
