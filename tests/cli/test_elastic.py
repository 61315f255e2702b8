import functools
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo

from torchstrategy.cli.elastic import AgreeingRendezvous, Agreement, WorkerEnvironments, tf_config

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


def meet(store, agreements):
    """Let launchers, in the order of their ranks, agree in one round."""
    with ThreadPoolExecutor(len(agreements)) as pool:
        rounds = [
            pool.submit(agreement.reach, SimpleNamespace(store=store, rank=rank, world_size=len(agreements)))
            for rank, agreement in enumerate(agreements)
        ]
        for one in rounds:
            one.result(timeout=10)


def test_launchers_agree_on_addresses_and_on_the_attempt():
    store = HashStore()
    first, second, late = Agreement(2, HOSTS[0]), Agreement(1, HOSTS[1]), Agreement(1, HOSTS[2])
    meet(PrefixStore("0", store), [first, second])
    assert first.addresses == second.addresses
    assert [address.split(":")[0] for address in first.addresses] == [HOSTS[0], HOSTS[0], HOSTS[1]]
    assert (first.attempt, second.attempt) == (0, 0)
    before = first.addresses

    meet(PrefixStore("1", store), [first, second])
    assert (first.attempt, second.attempt) == (1, 1)
    assert before != first.addresses == second.addresses

    # One that has just come knows nothing of earlier attempts; ranks may change.
    meet(PrefixStore("2", store), [late, first])
    assert (late.attempt, first.attempt) == (2, 2)
    assert [address.split(":")[0] for address in late.addresses] == [HOSTS[2], HOSTS[0], HOSTS[0]]


def test_each_round_has_a_store_of_its_own_on_a_host_that_is_there():
    """The first host, which had the store, is gone in the second round."""
    store = HashStore()
    first, second, third = (Agreement(1, host) for host in HOSTS)
    meet(PrefixStore("0", store), [first, second])
    before = first.store_address
    assert before == second.store_address
    assert before.master_addr == HOSTS[0]
    meet(PrefixStore("1", store), [second, third])
    assert second.store_address == third.store_address != before
    where = second.store_address
    assert where.master_addr == HOSTS[1]
    client = TCPStore(where.master_addr, where.master_port, is_master=False, wait_for_workers=False)
    assert client.add("workers", 1) == 1


def test_a_launcher_that_was_lost_while_all_agree_is_missed_in_the_next_round():
    store, rounds = HashStore(), []

    class Handler:
        def next_rendezvous(self):
            rounds.append(len(rounds))
            size = 2 if len(rounds) == 1 else 1
            return RendezvousInfo(PrefixStore(str(len(rounds)), store), 0, size, None)

    agreement = Agreement(1, HOSTS[0])
    agreement.reach = functools.partial(agreement.reach, patience_s=0.2)
    info = AgreeingRendezvous(Handler(), agreement).next_rendezvous()
    assert (info.world_size, len(rounds)) == (1, 2)
    assert info.bootstrap_store_info == agreement.store_address


def test_launchers_whose_store_is_lost_say_so():
    class Lost(HashStore):
        def check(self, keys):
            raise DistStoreError("gone")

    class Handler:
        def next_rendezvous(self):
            return RendezvousInfo(Lost(), 0, 2, None)

    with pytest.raises(RendezvousError, match="store was lost"):
        AgreeingRendezvous(Handler(), Agreement(1, HOSTS[0])).next_rendezvous()


def test_an_ipv6_host_stands_in_brackets():
    agreement = Agreement(1, "::1")
    meet(HashStore(), [agreement])
    assert agreement.addresses[0].startswith("[::1]:")


def test_variables_of_the_workers(tmp_path):
    agreement, restarts = Agreement(2, HOSTS[0]), []
    environments = WorkerEnvironments(agreement, str(tmp_path), lambda *arguments: restarts.append(arguments))
    for attempt in range(2):
        meet(PrefixStore(str(attempt), HashStore()), [agreement])
        envs = {i: {"RANK": str(4 + i), "TORCHELASTIC_RUN_ID": "x"} for i in range(2)}
        agreement.addresses = [f"h:{port}" for port in range(6)]
        places = environments.reify(envs)
        config = json.loads(envs[1]["TF_CONFIG"])
        assert config == {"cluster": {"worker": agreement.addresses}, "task": {"type": "worker", "index": 5}}
        assert envs[1]["TORCHELASTIC_RESTART_COUNT"] == str(attempt)
        assert envs[1]["TORCHELASTIC_ERROR_FILE"] == places.error_files[1]
    ((attempt, error_files),) = restarts
    assert attempt == 1
    assert set(error_files) == {4, 5}


def test_tf_config():
    assert json.loads(tf_config(["a:1", "b:2"], 1))["task"] == {"type": "worker", "index": 1}
