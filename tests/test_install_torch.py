"""Which torch `make` installs; pip, the GPU and the network are replaced."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "install_torch.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("install_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install(script, monkeypatch):
    def install(*, installed=False, gpu=False, reachable=False, available=(), platform="linux"):
        calls = []

        def pip_install(version, *options, quiet=False):
            calls.append((version, *options))
            return 0 if (version, *options) in available else 1

        monkeypatch.setattr(script, "_is_installed", lambda: installed)
        monkeypatch.setattr(script, "_has_nvidia_gpu", lambda: gpu)
        monkeypatch.setattr(script, "_is_reachable", lambda url: reachable)
        monkeypatch.setattr(script, "_pip_install", pip_install)
        monkeypatch.setattr(script.sys, "platform", platform)
        return script.main(), calls

    return install


def test_leaves_an_installed_torch_alone(install):
    assert install(installed=True) == (0, [])


@pytest.mark.parametrize("where", [{"gpu": True}, {"platform": "darwin"}])
def test_ordinary_build_where_it_is_the_right_one(install, script, where):
    assert install(available=[(script.PINNED,)], **where) == (0, [(script.PINNED,)])


def test_cpu_build_from_where_pip_looks(install, script):
    cpu = (script.PINNED + "+cpu",)
    assert install(available=[cpu, (script.PINNED,)], reachable=True) == (0, [cpu])


def test_cpu_build_from_the_cpu_index(install, script):
    cpu = script.PINNED + "+cpu"
    indexed = (cpu, "--extra-index-url", script.CPU_INDEX)
    assert install(available=[indexed, (script.PINNED,)], reachable=True) == (0, [(cpu,), indexed])


def test_ordinary_build_is_the_last_resort_and_says_so(install, script, capsys):
    code, calls = install(available=[(script.PINNED,)])
    assert (code, calls) == (0, [(script.PINNED + "+cpu",), (script.PINNED,)])
    assert "No CPU build" in capsys.readouterr().out


def test_an_old_torch_does_not_count(script, monkeypatch):
    monkeypatch.setattr(script.importlib.metadata, "version", lambda name: "2.8.1+cpu")
    assert not script._is_installed()
    monkeypatch.setattr(script.importlib.metadata, "version", lambda name: "2.10.0")
    assert script._is_installed()
