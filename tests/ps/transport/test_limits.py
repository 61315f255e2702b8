import pytest

from torchstrategy.ps.transport.limits import Limits


def test_defaults_arguments_and_environment(monkeypatch):
    assert Limits.from_environment() == Limits()
    monkeypatch.setenv("TORCHSTRATEGY_MAX_HEADER_BYTES", "123")
    assert Limits.from_environment() == Limits(max_header_bytes=123)
    assert Limits(max_control_bytes=77).of_control().max_message_bytes == 77


@pytest.mark.parametrize("text", ["0", "-1", "many", "1e6", ""])
def test_a_variable_that_is_no_size(monkeypatch, text):
    monkeypatch.setenv("TORCHSTRATEGY_MAX_MESSAGE_BYTES", text)
    with pytest.raises(ValueError, match="TORCHSTRATEGY_MAX_MESSAGE_BYTES must be a positive integer"):
        Limits.from_environment()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_an_argument_that_is_no_size(value):
    with pytest.raises(ValueError, match="max_frames must be a positive integer"):
        Limits(max_frames=value)
