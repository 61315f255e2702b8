"""Steps are recorded beside those that a benchmark times."""

import json

import profiles
import pytest
import torch
from torch.autograd import profiler as autograd_profiler

import torchstrategy as ts

CONFIG = {"profile": True, "profile_steps": {"skip": 1, "record": 5}}


def steps(path):
    return sum(event["name"].startswith("ProfilerStep#") for event in json.loads(path.read_text())["traceEvents"])


def fail_at(failing, number):
    torch.ones(2) + 1
    if number == failing:
        raise ArithmeticError("mine")


def test_traces_of_processes_that_tell_nothing_are_told(tmp_path, capsys):
    for rank in (10, 9):
        profiles.record_calls(lambda: torch.ones(2) + 1, {"skip": 1, "record": 1}, tmp_path, name=f"rank {rank}")
    capsys.readouterr()
    profiles.tell_of_traces(tmp_path, "rank_*")
    out = capsys.readouterr().out
    assert "rank 9     rank 10\n" in out
    assert f"Traces, for https://ui.perfetto.dev: {tmp_path / 'profile'}\n" in out
    profiles.tell_of_traces(tmp_path, "worker_*")
    assert "No steps of worker_* were recorded" in capsys.readouterr().out


def test_calls_are_recorded_beside_what_is_timed(tmp_path, capsys):
    calls = []
    folder = profiles.case_path(tmp_path, "ours, bf16", "2 hosts")
    profiles.record_calls(lambda: calls.append(torch.ones(2) + 1), {"skip": 2, "record": 3}, folder, name="rank 1")
    assert len(calls) == 5
    assert steps(tmp_path / "ours_bf16_2_hosts" / "profile" / "rank_1.json") == 3
    assert "(means of 3 steps)" in capsys.readouterr().out


def test_a_workers_function_that_fails_leaves_its_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(ts.coordinator, "experimental_get_current_worker_index", lambda: 3)
    batches = iter(range(9))

    @profiles.WorkerProfile(CONFIG, tmp_path).recorded
    def train_step(failing):
        """What a worker does."""
        number = next(batches)
        fail_at(failing, number)
        return number

    assert (train_step.__name__, train_step.__doc__) == ("train_step", "What a worker does.")
    assert [train_step(3) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ArithmeticError, match="mine"):
        train_step(3)
    path = tmp_path / "profile" / "worker_3.json"
    assert steps(path) == 3 - 1
    assert train_step(9) == 4, "the worker goes on"
    assert not autograd_profiler._is_profiler_enabled
