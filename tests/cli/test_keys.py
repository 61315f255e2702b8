import os
import stat

import pytest

from torchstrategy.cli import main
from torchstrategy.ps.transport.secret import Secret, find_secret


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch):
    monkeypatch.delenv("TORCHSTRATEGY_SECRET", raising=False)
    monkeypatch.delenv("TORCHSTRATEGY_SECRET_FILE", raising=False)


def test_the_secret_alone_is_on_stdout(capsys, monkeypatch):
    assert main(["keys"]) == 0
    out, err = capsys.readouterr()
    Secret(out)
    assert "TORCHSTRATEGY_SECRET=" in err
    assert out.strip() not in err
    monkeypatch.setenv("TORCHSTRATEGY_SECRET", out)
    assert find_secret(is_loopback=False).fingerprint == Secret(out).fingerprint
    assert main(["keys"]) == 0
    assert capsys.readouterr().out != out


def test_a_file_that_only_the_user_can_read(capsys, monkeypatch, tmp_path):
    path = tmp_path / "secret"
    umask = os.umask(0)
    try:
        assert main(["keys", "--output", str(path)]) == 0
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    out, err = capsys.readouterr()
    assert (out, path.read_text() in err) == ("", False)
    monkeypatch.setenv("TORCHSTRATEGY_SECRET_FILE", str(path))
    assert main(["keys", "--check"]) == 0
    assert capsys.readouterr().out == (
        f"The secret is taken from {path}; its fingerprint is {Secret(path.read_text()).fingerprint}.\n"
    )


def test_a_file_is_not_overwritten(capsys, tmp_path):
    path = tmp_path / "secret"
    path.write_text("dear")
    assert main(["keys", "--output", str(path)]) == 1
    assert "can't be written" in capsys.readouterr().err
    assert path.read_text() == "dear"


def test_a_check_without_a_secret(capsys, monkeypatch):
    assert main(["keys", "--check"]) == 2
    assert "No secret is configured" in capsys.readouterr().err
    monkeypatch.setenv("TORCHSTRATEGY_SECRET", "hunter2")
    assert main(["keys", "--check"]) == 2
    err = capsys.readouterr().err
    assert "128 random bits" in err
    assert "hunter2" not in err
