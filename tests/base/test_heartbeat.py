"""How long a process may be silent."""

import pytest

from torchstrategy.base.job import heartbeat_seconds


def test_ten_seconds_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("TORCHSTRATEGY_HEARTBEAT_S", raising=False)
    assert heartbeat_seconds() == 10.0
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "0.5")
    assert heartbeat_seconds() == 0.5


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_wrong_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", text)
    with pytest.raises(ValueError, match="TORCHSTRATEGY_HEARTBEAT_S must be a positive number of seconds"):
        heartbeat_seconds()
