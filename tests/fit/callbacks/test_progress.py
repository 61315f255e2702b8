import io
import logging
import re
import sys
import threading
import types

import pytest

from tests.fit.callbacks.loops import Model, fit
from torchstrategy.base import log
from torchstrategy.callbacks import CallbackList, ProgbarLogger
from torchstrategy.fit.callbacks import progress

LOGS = [{"loss": 2.0, "val_loss": 1.0416e-4}, {"loss": 0.5, "val_loss": 0.0}]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    # pytest puts its own sys.stdout in place after the fixtures.
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stdout=stream, modules=sys.modules))
    return stream


def last_lines(text):
    """Return what a terminal shows in the end."""
    return [line.rsplit("\r", 1)[-1].rstrip() for line in text.removesuffix("\n").split("\n")]


@pytest.mark.parametrize("verbose", [1, 2, "auto"])
def test_lines(capsys, verbose):
    fit(None, LOGS, verbose=verbose, steps=3)
    out, err = capsys.readouterr()
    assert re.sub(r"[\d.]+(s|ms|us)\b", "_", out).splitlines() == [
        "Epoch 1/2",
        "3/3 - _ - _/step - loss: 2.0000 - val_loss: 1.0416e-04",
        "Epoch 2/2",
        "3/3 - _ - _/step - loss: 0.5000 - val_loss: 0.0000",
    ]
    assert err == ""


def test_no_lines(capsys):
    fit(None, LOGS, verbose=0)
    fit(ProgbarLogger(), LOGS, verbose=0)
    fit(None, LOGS, verbose=1, model=Model(is_chief=False))
    assert capsys.readouterr() == ("", "")


def test_one_epoch_needs_no_number(capsys):
    fit(None, LOGS[:1], verbose=2)
    assert capsys.readouterr().out.startswith("2/2 - ")


def test_numbers_of_steps_that_are_not_known(capsys):
    fit(None, LOGS[:1], verbose=2, steps=None)
    assert capsys.readouterr().out.startswith("2/2 - ")


@pytest.mark.parametrize(("steps", "shown"), [(9, "2/9"), (1, "2/2")])
def test_epochs_of_another_length_than_announced(capsys, steps, shown):
    callbacks = CallbackList(None, Model(), {"epochs": 1, "steps": steps}, verbose=2)
    callbacks.on_epoch_begin(0)
    callbacks.on_train_batch_end(1, {})
    callbacks.on_epoch_end(0, {})
    assert capsys.readouterr().out.startswith(f"{shown} - ")


def test_bars(terminal):
    fit(None, LOGS, verbose=1, steps=3)
    first, second = last_lines(terminal.getvalue())
    assert re.match(r"Epoch 1/2: 100%\|█+\| 3/3 \[.*step.*, loss=2.0000, val_loss=1.0416e-04\]", first)
    assert re.match(r"Epoch 2/2: 100%\|█+\| 3/3 \[.*, loss=0.5000, val_loss=0.0000\]", second)


def test_lines_on_a_terminal(terminal):
    fit(None, LOGS[:1], verbose=2)
    assert terminal.getvalue().startswith("2/2 - ")


def test_a_bar_learns_the_number_of_steps(terminal):
    fit(None, LOGS, verbose=1, steps=None)
    titles = re.findall(r"\rEpoch 2/2:.*?\| 0/(\d+) ", terminal.getvalue())
    assert titles[0] == "2"
    assert "Epoch 1/2: 0step" in terminal.getvalue()


def test_bars_make_no_thread_and_stay_closed(terminal):
    before = threading.active_count()
    callbacks = CallbackList(None, Model(), {"epochs": 2, "steps": 3}, verbose=1)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    assert threading.active_count() == before
    callbacks.close()  # the training failed
    text = terminal.getvalue()
    assert text.endswith("\n")
    callbacks.on_train_begin()
    assert terminal.getvalue() == text


class Logs(dict):
    reads = 0

    def items(self):
        self.reads += 1
        return super().items()


def test_logs_are_read_seldom(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar, logs = ProgbarLogger(), Logs(loss=1.0)
    bar.set_model(Model())
    bar.set_params({"verbose": 1, "epochs": 1, "steps": 100})
    bar.on_train_begin()
    bar.on_epoch_begin(0)
    for batch in range(100):
        now[0] += 0.01
        bar.on_train_batch_end(batch, logs)
    assert 3 <= logs.reads <= 5
    assert "loss=1.0000" in terminal.getvalue()
    bar._release()


def test_lines_read_no_logs_of_batches(capsys):
    bar, logs = ProgbarLogger(), Logs(loss=1.0)
    bar.set_model(Model())
    bar.set_params({"verbose": 1, "epochs": 1, "steps": 2})
    bar.on_epoch_begin(0)
    bar._read_s = -1e9
    bar.on_train_batch_end(0, logs)
    assert logs.reads == 0


def test_lines_of_others_stand_above_the_bar(terminal):
    callbacks = CallbackList(None, Model(), {"epochs": 1, "steps": 3}, verbose=1)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    progress.print_line("between")
    callbacks.on_train_batch_end(2, {})
    callbacks.on_epoch_end(0, {"loss": 1.0})
    callbacks.close()
    lines = last_lines(terminal.getvalue())
    assert lines[0] == "between"
    assert lines[1].startswith("100%")
    assert len(lines) == 2


@pytest.mark.parametrize("verbose", [1, 2])
def test_evaluate_and_predict(capsys, verbose):
    callbacks = CallbackList(None, Model(), {"epochs": 1, "steps": 2}, verbose=verbose, add_history=False)
    callbacks.on_test_begin()
    callbacks.on_test_batch_end(0, {"loss": 1.0})
    callbacks.on_test_batch_end(1, {"loss": 2.0})
    callbacks.on_test_end({"loss": 2.0})
    assert re.fullmatch(r"2/2 - .*/step - loss: 2.0000\n", capsys.readouterr().out)
    callbacks.on_predict_begin()
    callbacks.on_predict_batch_end(0, {"outputs": object()})
    callbacks.on_predict_batch_end(1, {"outputs": object()})
    callbacks.on_predict_end({})
    assert re.fullmatch(r"2/2 - .*/step\n", capsys.readouterr().out)


def test_bars_of_evaluate_and_predict(terminal):
    callbacks = CallbackList(None, Model(), {"epochs": 1, "steps": 2}, verbose=1, add_history=False)
    callbacks.on_test_begin()
    callbacks.on_test_batch_end(1, {"loss": 2.0})
    callbacks.on_test_end({"loss": 2.0})
    callbacks.on_predict_begin()
    callbacks.on_predict_batch_end(1, {"outputs": object()})
    callbacks.on_predict_end()
    first, second = last_lines(terminal.getvalue())
    assert re.match(r"100%\|█+\| 2/2 \[.*loss=2.0000\]", first)
    assert re.match(r"100%\|█+\| 2/2 \[.*step/s\]", second)


def test_the_validation_of_fit_is_silent(capsys):
    callbacks = CallbackList(None, Model(), {"epochs": 1, "steps": 2}, verbose=2)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_train_batch_end(1, {})
    callbacks.on_test_begin()
    callbacks.on_test_batch_end(7, {})
    callbacks.on_test_end({"loss": 1.0})
    assert capsys.readouterr().out == ""
    callbacks.on_epoch_end(0, {"loss": 2.0})
    assert capsys.readouterr().out.startswith("2/2 - ")


@pytest.mark.parametrize("value", [float("nan"), -5.0, 12345.678, "text", [1, 2]])
def test_any_value_can_be_shown(capsys, value):
    fit(None, [{"value": value}], verbose=2)
    assert "value: " in capsys.readouterr().out


class Broken(Terminal):
    def __init__(self, *, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_broken_output_breaks_nothing(monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stdout", Broken(is_terminal=is_terminal))
    assert len(fit(None, LOGS, verbose=1)[1]) == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_closed_output_breaks_nothing(monkeypatch, is_terminal):
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    close = lambda epoch, model: stream.close()  # noqa: E731
    assert len(fit(None, LOGS, verbose=1, before_epoch=close)[1]) == 2


def test_no_output_breaks_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert len(fit(None, LOGS, verbose=1)[1]) == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_characters_that_cannot_be_encoded_are_replaced(monkeypatch, is_terminal):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(progress, "shows_bars", lambda: is_terminal)
    fit(None, [{"größe": 1.0}], verbose=1)
    assert b"gr??e" in raw.getvalue()
    stream.detach()


@pytest.mark.parametrize("widgets", ["there", "not there", "too old"])
def test_notebooks_get_bars(monkeypatch, capsys, widgets):
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None if widgets == "not there" else object())
    made = []

    def widget(**arguments):
        if widgets == "too old":
            raise ImportError("IProgress not found")
        made.append(arguments)
        return progress._TextBar(file=sys.stdout, **arguments)

    monkeypatch.setitem(sys.modules, "tqdm.notebook", types.SimpleNamespace(tqdm=widget))
    assert progress.is_notebook()
    fit(None, LOGS[:1], verbose=1)
    assert bool(made) is (widgets == "there")
    assert "100%" in capsys.readouterr().out


def test_a_program_is_no_notebook(monkeypatch):
    assert not progress.is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not progress.is_notebook()


@pytest.mark.parametrize("verbose", [3, -1, "AUTO", None])
def test_wrong_verbose(verbose):
    with pytest.raises(ValueError, match=r"verbose must be 0 \(nothing\).*Received: "):
        CallbackList(None, verbose=verbose)


def test_a_bar_makes_way_for_a_line_of_the_log(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = log._StderrHandler()
    bar = progress.make_bar(3, "Epoch 1/1")
    try:
        handler.emit(logging.makeLogRecord({"msg": "a line", "levelno": logging.INFO, "levelname": "INFO"}))
    finally:
        bar.close()
    before, after = terminal.getvalue().split("a line\n")
    assert before.rsplit("\r", 2)[-2:] == [" " * len(before.rsplit("\r", 2)[-2]), ""]  # what was shown is wiped out
    assert "Epoch 1/1" in after
