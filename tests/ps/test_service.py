"""What a parameter server makes of requests that ``ParameterClient`` would not send."""

import gc
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ps.local_channels import LocalChannel, connect, make_servers
from torchstrategy.errors import NotFoundError
from torchstrategy.ps import shard as shard_module
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.optimizer_states import unpack_state
from torchstrategy.ps.service import ParameterService
from torchstrategy.ps.transport.messages import Message

KINDS = ["create", "pull", "rows", "update", "scatter", "read", "write", "push", "state", "load_state"]
SESSION = SimpleNamespace(id="s", is_valid=True, role="coordinator", hello={"client": "s"})


def make_service():
    """Return a service with a variable ``w`` of ``[4, 2]`` ones and the optimizer 0 of it."""
    service = ParameterService()
    service.tensor(SESSION, Message("create", {"parts": [[0, 0, "w", True]]}, (torch.ones(4, 2),)))
    channel = LocalChannel(service)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    groups = [{**plain.param_groups[0], "params": [0]}]
    definition = pickle.dumps({"class": torch.optim.SGD, "defaults": plain.defaults, "groups": groups})
    channel.peer.call(Message("optimizer", {"optimizer": 0, "sharded": []}, blobs=(definition,)))
    return service


def content(service):
    reply = service.tensor(SESSION, Message("pull", {"parts": [[0, 0, -1]]}))
    return reply.fields["versions"], reply.tensors[0].tolist()


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        (Message("format_disk", {}), ValueError, "knows no request 'format_disk'"),
        (Message("pull", {}), ValueError, r"'pull' needs a list 'parts'\. Received: None"),
        (Message("pull", {"parts": 3}), ValueError, "Received: 3"),
        (Message("pull", {"parts": [3]}), ValueError, "needs parts of int, int, int"),
        (Message("pull", {"parts": [[0, 0]]}), ValueError, "needs parts of int, int, int"),
        (Message("pull", {"parts": [[0, 0, True]]}), ValueError, "needs parts of int, int, int"),
        (Message("pull", {"parts": [[0, 10**30, -1]]}), NotFoundError, "no part 10{30} of a variable 0"),
        (Message("update", {"parts": [[0, 0, "assign"]]}), ValueError, "needs 1 tensors"),
        (Message("update", {"parts": []}, (torch.zeros(1),)), ValueError, "needs 0 tensors"),
        (Message("scatter", {"parts": [[0, 0]]}, (torch.zeros(1),)), ValueError, "needs 2 tensors"),
        (
            Message("scatter", {"parts": [[0, 0]], "method": 1}, (torch.tensor([0]), torch.zeros(1, 2))),
            ValueError,
            "needs a str 'method'",
        ),
        (Message("read", {"parts": []}), ValueError, "needs 1 parts"),
        (Message("read", {"parts": [[0, 0, 2, 4]]}), NotFoundError, "read from its beginning"),
        (Message("read", {"parts": [[0, 0, 0, 9]]}), ValueError, "8 elements has none from 0 to 9"),
        (Message("read", {"parts": [[0, 0, 0, -1]]}), ValueError, "none from 0 to -1"),
        (Message("write", {"parts": [[0, 0, 4]]}, (torch.zeros(5),)), ValueError, "8 elements"),
        (Message("push", {"parts": []}), ValueError, "needs a int 'optimizer'"),
        (Message("push", {"parts": [], "optimizer": 5}), NotFoundError, "no optimizer 5"),
        (
            Message("push", {"parts": [[0, 0, False]] * 2, "optimizer": 0}, (torch.ones(4, 2),) * 2),
            ValueError,
            "one gradient for each part",
        ),
        (
            Message("push", {"parts": [[0, 0, True]], "optimizer": 0}, (torch.tensor([9]), torch.ones(1, 2))),
            IndexError,
            "'w' has rows 0 to 3",
        ),
        (
            Message("push", {"parts": [[0, 0, True]], "optimizer": 0}, (torch.tensor([[1]]), torch.ones(1, 2))),
            ValueError,
            "vector of int64",
        ),
        (Message("load_state", {"parts": [[0, 0]], "states": [], "optimizer": 0}), ValueError, "shorter|argument"),
        (Message("load_state", {"parts": [[0, 0]], "states": [{"a": 3}], "optimizer": 0}), ValueError, "no state"),
        (
            Message("load_state", {"parts": [[0, 0]], "states": [{"a": {"tensor": 3}}], "optimizer": 0}),
            ValueError,
            "no state of an optimizer",
        ),
    ],
)
def test_wrong_requests(message, error, text):
    service = make_service()
    with pytest.raises(error, match=text):
        service.tensor(SESSION, message)
    assert content(service) == ([1], [[1.0, 1.0]] * 4)


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        (Message("shutdown", {}), ValueError, "no control request 'shutdown'"),
        (Message("optimizer", {"optimizer": 1}), ValueError, "needs a list 'sharded'"),
        (Message("optimizer", {"optimizer": 1, "sharded": []}), ValueError, "one blob"),
        (Message("optimizer", {"optimizer": 1, "sharded": []}, blobs=(b"x",)), Exception, "Unpickling"),
        (
            Message("optimizer", {"optimizer": 1, "sharded": []}, blobs=(pickle.dumps([1]),)),
            TypeError,
            "defined by its class",
        ),
        (
            Message(
                "optimizer",
                {"optimizer": 1, "sharded": []},
                blobs=(pickle.dumps({"class": int, "defaults": {}, "groups": []}),),
            ),
            TypeError,
            r"is a torch\.optim\.Optimizer",
        ),
        (Message("hyper", {"optimizer": 4}, blobs=(pickle.dumps([]),)), NotFoundError, "no optimizer 4"),
    ],
)
def test_wrong_control_requests(message, error, text):
    service = make_service()
    with pytest.raises(error, match=text):
        LocalChannel(service).peer.call(message)
    assert service.held.optimizers.keys() == {0}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["assign", "w", "", 10**20, 0.5]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["tensor", "value", "a"]), inner),
    max_leaves=8,
)
rows = st.lists(st.lists(st.integers(-1, 2) | st.booleans() | st.sampled_from(["assign", "w"]), max_size=4), max_size=3)
tensors = st.lists(
    st.sampled_from([torch.ones(4, 2), torch.ones(1, 2), torch.tensor([0]), torch.tensor([-3]), torch.ones(())]),
    max_size=4,
)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(
    st.sampled_from(KINDS),
    st.fixed_dictionaries(
        {"parts": rows | values},
        optional={"optimizer": st.just(0) | values, "method": st.just("scatter_add") | values, "states": values},
    ),
    tensors,
)
def test_any_request_is_answered_or_refused(kind, fields, given_tensors):
    """Also by an authenticated client nothing can be broken but the values that it may change."""
    service = make_service()
    before = content(service)
    try:
        reply = service.tensor(SESSION, Message(kind, fields, tuple(given_tensors)))
    except Exception:  # noqa: BLE001
        assert content(service) == before
    else:
        assert isinstance(reply, Message)
    service.tensor(SESSION, Message("update", {"parts": [[0, 0, "assign"]]}, (torch.zeros(4, 2),)))
    assert content(service)[1] == [[0.0, 0.0]] * 4


def test_a_new_coordinator_begins_anew():
    service = make_service()
    service.superseded(2)
    with pytest.raises(NotFoundError):
        content(service)
    assert service.admit({"role": "worker", "incarnation": 2}) == {"job": "ps", "is_saved": False}
    service.tensor(SESSION, Message("create", {"parts": [[0, 0, "w", True]]}, (torch.zeros(1),)))
    assert content(service) == ([1], [0.0])


def test_lost_clients_leave_no_snapshots():
    service = make_service()
    service.tensor(SESSION, Message("read", {"parts": [[0, 0, 0, 4]]}))
    other = SimpleNamespace(id="t", is_valid=True, role="coordinator", hello={"client": "t"})
    service.tensor(other, Message("read", {"parts": [[0, 0, 0, 4]]}))
    service.lost(SESSION)
    with pytest.raises(NotFoundError, match="from its beginning"):
        service.tensor(SESSION, Message("read", {"parts": [[0, 0, 4, 8]]}))
    assert service.tensor(other, Message("read", {"parts": [[0, 0, 4, 8]]})).tensors[0].tolist() == [1.0] * 4
    assert not service.held.snapshots


def test_a_client_that_is_lost_during_its_first_read_leaves_no_snapshot():
    service = make_service()
    session = SimpleNamespace(id="t", is_valid=True, role="coordinator", hello={"client": "t"})
    snapshot = service.held.store.snapshot

    def lose_meanwhile(key):
        session.is_valid = False
        service.lost(session)
        return snapshot(key)

    service.held.store.snapshot = lose_meanwhile
    with pytest.raises(NotFoundError):
        service.tensor(session, Message("read", {"parts": [[0, 0, 0, 4]]}))
    assert not service.held.snapshots


def test_a_change_that_is_asked_for_again_is_made_once():
    service = make_service()

    def add(number, client="a", amount=1.0):
        session = SimpleNamespace(id="s", is_valid=True, role="coordinator", hello={"client": client})
        fields = {"parts": [[0, 0, "assign_add"]], "once": number}
        return service.tensor(session, Message("update", fields, (torch.full((4, 2), amount),))).fields["versions"]

    first = add(1)
    assert add(1) == first
    assert content(service) == (first, [[2.0, 2.0]] * 4)
    add(2)
    add(2, client="b")
    assert content(service)[1] == [[4.0, 4.0]] * 4
    with pytest.raises(ValueError, match="shape"):
        service.tensor(
            SimpleNamespace(id="s", role="coordinator", hello={"client": "a"}),
            Message("update", {"parts": [[0, 0, "assign_add"]], "once": 3}, (torch.ones(3),)),
        )
    add(3)  # what has failed was not made
    assert content(service)[1] == [[5.0, 5.0]] * 4
    with pytest.raises(ValueError, match="2 comes after 3"):
        add(2)  # it was on its way for long


def test_replies_to_clients_that_do_not_come_back_are_forgotten(monkeypatch):
    service = make_service()
    now = [0.0]
    monkeypatch.setattr(shard_module.time, "monotonic", lambda: now[0])
    for number in range(50):
        session = SimpleNamespace(id="s", is_valid=True, role="worker", hello={"client": f"{number}"})
        fields = {"parts": [[0, 0, "assign_add"]], "once": 1}
        if number % 2:
            service.lost(session)  # before a request that waits for its turn
        service.tensor(session, Message("update", fields, (torch.ones(4, 2),)))
        if number % 2 == 0:
            service.lost(session)
        now[0] += 600.0
    assert len(service.held._replies) == len(service.held._answering) == len(service.held._lost) <= 8


def test_definitions_do_not_hold_up_the_control_thread():
    service = make_service()
    release = threading.Event()
    arrived = threading.Event()
    session = SimpleNamespace(id="s", is_valid=True, role="coordinator", reply=lambda number, message: arrived.set())
    _Waits.release = release
    blob = pickle.dumps(_Waits())
    message = Message("optimizer", {"optimizer": 1, "sharded": []}, blobs=(blob,))
    assert service.control(session, message) is None  # at once
    assert not arrived.is_set()
    release.set()
    assert arrived.wait(60)


class _Waits:
    release = None

    def __reduce__(self):
        return _wait, ()


def _wait():
    _Waits.release.wait(60)
    return {}


def test_state_of_a_user_that_json_can_not_hold():
    with pytest.raises(ValueError, match="no state of an optimizer"):
        unpack_state(["x"], ())


@pytest.mark.slow
def test_memory_does_not_grow():
    """Neither pushes nor pulls leave tensors behind."""
    services, client = make_servers(1)
    spec = Placer(1).place(0, "w", (50_000,), torch.float32, True)
    client.create(spec, torch.zeros(50_000))
    plain = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    groups = [{**plain.param_groups[0], "params": [0]}]
    definition = {"class": torch.optim.Adam, "defaults": plain.defaults, "groups": groups}
    client.define_optimizer(0, pickle.dumps(definition), [spec])
    worker = connect(services)
    worker.know([spec])

    def live():
        gc.collect()
        return sum(issubclass(type(obj), torch.Tensor) and obj.numel() >= 50_000 for obj in gc.get_objects())

    counts = []
    for _ in range(4):
        for _ in range(5):
            worker.push(0, {0: torch.ones(50_000)})
            worker.pull([spec], {})
        counts.append(live())
    assert counts[0] == counts[-1]
