import functools
from types import SimpleNamespace

import pytest
import torch

from torchstrategy.ps import sharing_service
from torchstrategy.ps.service import ParameterService
from torchstrategy.ps.transport.messages import FencedError, Message

CREATE = Message("create", {"parts": [[0, 0, "w", True]]}, (torch.ones(2),))
PULL = Message("pull", {"parts": [[0, 0, -1]]})


@pytest.fixture
def service():
    return ParameterService()


def connect(service, role, task, name=""):
    hello = {"role": role, "task": task, "client": f"client of {task}{name}"}
    service.admit(hello)
    return SimpleNamespace(id=hello["client"], role=role, hello=hello)


def ask(service, session, kind, **fields):
    return service.control(session, Message(kind, fields))


def test_who_is_not_attached_is_refused(service):
    chief, task = connect(service, "chief", "chief 0"), connect(service, "task", "worker 0")
    with pytest.raises(FencedError):
        service.tensor(chief, CREATE)
    ask(service, chief, "begin", number=3)
    service.tensor(chief, CREATE)
    for request in (
        lambda: service.tensor(task, PULL),
        lambda: ask(service, task, "attach", number=2),
        lambda: ask(service, task, "publish", layout={}),
        lambda: ask(service, task, "hyper"),
    ):
        with pytest.raises(FencedError):
            request()
    ask(service, task, "attach", number=3)
    assert service.tensor(task, PULL).tensors[0].tolist() == [1.0, 1.0]


def test_a_new_training_drops_what_was_there(service):
    chief, task = connect(service, "chief", "chief 0"), connect(service, "task", "worker 0")
    ask(service, chief, "begin", number=3)
    service.tensor(chief, CREATE)
    ask(service, chief, "publish", layout={"variables": []})
    ask(service, task, "attach", number=3)
    assert ask(service, task, "status").fields == {"number": 3, "layout": {"variables": []}}
    successor = connect(service, "chief", "chief 0", "'s successor")
    ask(service, successor, "begin", number=4)
    assert ask(service, task, "status").fields == {"number": 4, "layout": None}
    for session in (chief, task):
        with pytest.raises(FencedError):
            service.tensor(session, PULL)
    with pytest.raises(FencedError, match="newer training"):
        ask(service, chief, "begin", number=3)
    service.tensor(successor, CREATE)  # nothing of this number is there


def test_a_coordinator_ends_it(service):
    chief = connect(service, "chief", "chief 0")
    ask(service, chief, "begin", number=3)
    service.superseded(7)
    with pytest.raises(FencedError):
        service.tensor(chief, PULL)


@pytest.mark.parametrize("number", [None, "3", True, 2.0])
def test_a_training_needs_a_number(service, number):
    with pytest.raises(ValueError, match="has a number"):
        ask(service, connect(service, "chief", "chief 0"), "begin", number=number)


def test_for_whom_a_server_waits(service):
    workers = ["worker 0", "worker 1"]
    chief, task = connect(service, "chief", "chief 0"), connect(service, "task", "worker 0")
    training = service.training
    assert training.waits_for(workers, 60.0, 60.0) is None
    ask(service, chief, "begin", number=3)
    ask(service, chief, "finish")
    assert training.waits_for(workers, 60.0, 60.0) == ["chief 0", "worker 0", "worker 1"]
    assert training.waits_for(workers, 0.0, 60.0) == ["chief 0", "worker 0"]
    service.lost(chief)
    again = connect(service, "task", "worker 0", " again")
    service.lost(task)
    assert training.waits_for(workers, 0.0, 60.0) == ["worker 0"]
    ask(service, again, "finish")
    assert training.waits_for(workers, 0.0, 0.0) == ["worker 0"]
    service.lost(again)
    assert training.waits_for(workers, 60.0, 0.0) == ["worker 1"]
    assert training.waits_for(workers, 0.0, 0.0) == []
    ask(service, connect(service, "chief", "chief 0"), "begin", number=4)
    assert training.waits_for(workers, 0.0, 60.0) is None


def test_who_is_lost_without_having_finished_is_waited_for_during_the_grace_time(service, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sharing_service.time, "monotonic", lambda: now[0])
    chief, tasks = connect(service, "chief", "chief 0"), [connect(service, "task", f"worker {k}") for k in range(2)]
    waits_for = functools.partial(service.training.waits_for, [], 0.0, 30.0)
    ask(service, chief, "finish")
    ask(service, tasks[1], "finish")
    for session in (chief, *tasks):
        service.lost(session)
    now[0] += 29.0
    assert waits_for() == ["worker 0"]
    back = connect(service, "task", "worker 0")  # the same client
    now[0] += 29.0
    assert waits_for() == ["worker 0"]
    service.lost(back)
    now[0] += 29.0
    assert waits_for() == ["worker 0"]
    now[0] += 2.0
    assert waits_for() == []
