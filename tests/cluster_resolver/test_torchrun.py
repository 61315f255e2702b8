import pytest

from torchstrategy.cluster_resolver.torchrun import TorchrunEnvironment

FULL = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_reads_everything():
    found = TorchrunEnvironment.detect({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == TorchrunEnvironment(3, 4, 1, 2, "127.0.0.1", 29500, agent_store=True)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"RANK": "0"}])
def test_one_process(environ):
    assert TorchrunEnvironment.detect(environ) is None


@pytest.mark.parametrize("name", FULL)
def test_missing_and_bad_variables(name):
    if name != "WORLD_SIZE":
        with pytest.raises(RuntimeError, match=f"{name} not set.*torchrun"):
            TorchrunEnvironment.detect({key: value for key, value in FULL.items() if key != name})
    if name != "MASTER_ADDR":
        with pytest.raises(RuntimeError, match=f"{name} must be an integer"):
            TorchrunEnvironment.detect({**FULL, name: "two"})
