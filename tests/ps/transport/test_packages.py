import subprocess
import sys

import pytest

from torchstrategy.ps.transport import sockets

PROGRAM = """
import sys
sys.modules["zmq"] = sys.modules["cloudpickle"] = None
import torchstrategy
from torchstrategy.cli import main
from torchstrategy.ps.transport.listener import Listener
main(["keys"])
Listener("127.0.0.1:0", None)
"""


@pytest.mark.slow
def test_the_library_is_importable_without_them():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert len(done.stdout) == 65
    assert "ImportError: Parameter servers need pyzmq and cloudpickle" in done.stderr
    assert "pip install 'cloudpickle>=3' 'pyzmq>=26'" in done.stderr


def test_what_is_missing_is_named(monkeypatch):
    sockets.require()
    monkeypatch.setattr(sockets.zmq, "has", lambda what: False)
    with pytest.raises(ImportError, match="no CURVE encryption"):
        sockets.require()
    monkeypatch.setattr(sockets, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"need cloudpickle, .* pip install 'cloudpickle>=3' 'pyzmq>=26'"):
        sockets.require()
