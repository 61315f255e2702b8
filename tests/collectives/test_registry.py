from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import torchstrategy as ts
from torchstrategy.collectives import routes
from torchstrategy.collectives.backends import C10dBackend
from torchstrategy.collectives.routes import make_registered_backend


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(routes, "_factories", {})


def make(name):
    return make_registered_backend(name, HashStore(), 0, 1, timedelta(seconds=5))


class Backend:
    def start_sum(self, tensor):
        return lambda check: None

    start_all_gather = start_broadcast = start_sum


def test_an_object_with_our_methods_is_taken_as_it_is():
    backend = Backend()
    seen = []
    ts.experimental.register_communication("Of-Objects", lambda *args: seen.append(args) or backend)
    assert make("of-objects") is backend
    ((store, rank, size, timeout),) = seen
    assert isinstance(store, HashStore)
    assert (rank, size, timeout) == (0, 1, timedelta(seconds=5))
    assert ts.experimental.CommunicationOptions(implementation="OF-objects").implementation == "of-objects"


def test_a_process_group_is_wrapped():
    ts.experimental.register_communication("of-groups", dist.ProcessGroupGloo)
    assert isinstance(make("of-groups"), C10dBackend)


@pytest.mark.parametrize("name", ["taken", "TAKEN"])
def test_a_taken_name(name):
    ts.experimental.register_communication("taken", Backend)
    with pytest.raises(ValueError, match=r"is taken\. Taken are: taken"):
        ts.experimental.register_communication(name, Backend)


@pytest.mark.parametrize("name", ["", " ", "ring", "AUTO", "Nccl"])
def test_names_that_can_not_be_given(name):
    with pytest.raises(ValueError, match="must be another"):
        ts.experimental.register_communication(name, Backend)
    assert routes._factories == {}


@pytest.mark.parametrize(("name", "factory"), [(3, Backend), ("fine", "not callable")])
def test_wrong_types(name, factory):
    with pytest.raises(TypeError, match="Received"):
        ts.experimental.register_communication(name, factory)


def test_an_unknown_name():
    ts.experimental.register_communication("known", Backend)
    with pytest.raises(ValueError, match=r"No communication is registered as 'other' .* Registered are: known"):
        make("other")


def test_a_factory_that_fails():
    def factory(store, rank, size, timeout):
        raise OSError("no network card")

    ts.experimental.register_communication("failing", factory)
    with pytest.raises(RuntimeError, match="'failing' failed on rank 0: OSError: no network card") as caught:
        make("failing")
    assert isinstance(caught.value.__cause__, OSError)


def test_what_is_lacking_is_named():
    ts.experimental.register_communication("half", lambda *args: type("Half", (), {"start_sum": print})())
    with pytest.raises(TypeError, match=r"no c10d process group .* and lacks start_all_gather, start_broadcast"):
        make("half")
