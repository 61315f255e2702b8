"""What is said where torch_xla is missing or does not fit to torch; it is not imported for that."""

import importlib.metadata
import importlib.util

import pytest
import torch

from torchstrategy.xla import runtime


@pytest.fixture
def installed(monkeypatch):
    def install(torch_version, xla_version, *, is_there=True):
        def version(name):
            assert name == "torch-xla"
            if xla_version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return xla_version

        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_there else None)

    return install


@pytest.mark.parametrize(
    ("torch_version", "xla_version"),
    [
        ("2.9.1", "2.9.0"),
        ("2.9.0+cpu", "2.9.0"),
        ("2.10.0.dev20260101+cu130", "2.10.0rc1"),
        ("2.13.0", None),  # built from source: only importing it can tell
    ],
)
def test_pairs_that_fit(installed, torch_version, xla_version):
    installed(torch_version, xla_version)
    runtime.check_installation()


@pytest.mark.parametrize(
    ("torch_version", "xla_version", "needed"),
    [("2.13.0+cpu", "2.9.0", "2.9"), ("2.9.1", "2.10.0", "2.10"), ("2.1.0", "2.10.0", "2.10")],
)
def test_wrong_pairs_are_named(installed, torch_version, xla_version, needed):
    installed(torch_version, xla_version)
    with pytest.raises(ImportError) as caught:
        runtime.check_installation()
    message = str(caught.value)
    assert f"torch_xla {xla_version} does not fit to torch {torch_version}: it needs torch {needed}," in message
    assert message.endswith(f"pip install 'torch=={needed}.*' 'torch-xla[tpu]=={needed}.*'")


def test_missing(installed):
    installed("2.9.1", None, is_there=False)
    with pytest.raises(ImportError, match=r"pip install 'torch-xla\[tpu\]=="):
        runtime.check_installation()
    assert not runtime.is_installed()


def test_a_failure_is_not_remembered(installed):
    runtime.get_runtime.cache_clear()
    for _ in range(2):
        installed("2.13.0", "2.9.0")
        with pytest.raises(ImportError, match="does not fit"):
            runtime.get_runtime()


def test_an_obscure_import_error_gets_the_versions(installed, monkeypatch):
    runtime.get_runtime.cache_clear()
    installed("2.9.1", "2.9.0")

    def fail():
        raise ImportError("_XLAC.so: undefined symbol: _ZN5torch4lazy")

    monkeypatch.setattr(runtime, "TorchXlaRuntime", fail)
    with pytest.raises(ImportError, match=r"torch_xla 2\.9\.0 can't be imported with torch 2\.9\.1: _XLAC\.so: undef"):
        runtime.get_runtime()
