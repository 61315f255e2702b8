import pytest
import torch

from torchstrategy import errors
from torchstrategy.ps.transport.messages import (
    FencedError,
    MessageError,
    RefusedError,
    error_message,
    raise_error,
    rebuild_error,
)


class OwnError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text"),
        IndexError("text"),
        ZeroDivisionError("text"),
        errors.UnavailableError("text"),
        errors.InvalidArgumentError("text"),
        RefusedError("text"),
        FencedError("text"),
        StopIteration("text"),
    ],
    ids=repr,
)
def test_known_errors_keep_their_class(error):
    with pytest.raises(type(error), match=r"^text$"):
        raise_error(error_message(error))


def test_a_missing_key_keeps_its_text():
    assert rebuild_error(error_message(KeyError("name"))).args == ("name",)


@pytest.mark.parametrize(
    "error",
    [
        OwnError("text"),
        MessageError("text"),
        torch.OutOfMemoryError("text"),
        type("ValueError", (Exception,), {})("text"),
    ],
    ids=repr,
)
def test_others_become_a_runtime_error_that_names_them(error):
    rebuilt = rebuild_error(error_message(error))
    assert type(rebuilt) is RuntimeError
    assert str(rebuilt) == f"{type(error).__name__}: text"


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        OSError(98, "Address already in use"),
        KeyError("a", "b"),
    ],
    ids=repr,
)
def test_errors_of_several_arguments_keep_their_text(error):
    assert str(error) in str(rebuild_error(error_message(error)))


@pytest.mark.parametrize(
    "name", ["SystemExit", "KeyboardInterrupt", "eval", "print", "__import__", "annotations", "", None]
)
def test_a_name_makes_nothing_but_exceptions(name):
    message = error_message(ValueError("text"))
    message.fields["type"] = name
    assert type(rebuild_error(message)) is RuntimeError
