import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from torch.distributed import HashStore, PrefixStore

from torchstrategy.cli.elastic import Agreement, WorkerEnvironments, tf_config


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
    first, second, late = Agreement(2, "a"), Agreement(1, "b"), Agreement(1, "c")
    meet(PrefixStore("0", store), [first, second])
    assert first.addresses == second.addresses
    assert [address.split(":")[0] for address in first.addresses] == ["a", "a", "b"]
    assert (first.attempt, second.attempt) == (0, 0)
    before = first.addresses

    meet(PrefixStore("1", store), [first, second])
    assert (first.attempt, second.attempt) == (1, 1)
    assert before != first.addresses == second.addresses

    # One that has just come knows nothing of earlier attempts; ranks may change.
    meet(PrefixStore("2", store), [late, first])
    assert (late.attempt, first.attempt) == (2, 2)
    assert [address.split(":")[0] for address in late.addresses] == ["c", "a", "a"]


def test_an_ipv6_host_stands_in_brackets():
    agreement = Agreement(1, "::1")
    meet(HashStore(), [agreement])
    assert agreement.addresses[0].startswith("[::1]:")


def test_variables_of_the_workers(tmp_path):
    agreement, restarts = Agreement(2, "a"), []
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
