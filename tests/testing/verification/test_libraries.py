"""Scripts of Fabric and Accelerate, and of a stand-in that wraps as they do, are verified as they are."""

import importlib.util
from pathlib import Path

import pytest

from torchstrategy.testing.verification.script import verify_script

SCRIPT = str(Path(__file__).parent / "scripts/wrapped_script.py")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["stand-in", "lightning_fabric", "accelerate"])
@pytest.mark.parametrize(("examples", "kinds"), [(12, set()), (11, {"example seen twice"})])
def test_uneven_last_batch_is_named(library, examples, kinds):
    if library != "stand-in" and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    report = verify_script(SCRIPT, [library, str(examples)], timeout_s=60)
    assert report.kinds == kinds, str(report)
    assert report.ok is not bool(kinds)
