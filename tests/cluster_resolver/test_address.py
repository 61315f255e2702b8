import pytest

from torchstrategy.cluster_resolver.address import format_address, split_address


@pytest.mark.parametrize("host", ["host1", "10.0.0.1", "::1", "fe80::1%eth0", "a-b.c"])
def test_there_and_back(host):
    assert split_address(format_address(host, 2222), "worker 0") == (host, 2222)


@pytest.mark.parametrize(
    "address", ["host1", "host1:", ":2222", "", "host1:port", "host1:0", "host1:65536", "host1:-1", "::1:2222", "[]:1",
                "grpc://host1:2222", "host1:²"]
)  # fmt: skip
def test_bad_addresses(address):
    with pytest.raises(ValueError, match=r"address of worker 0 must be host:port.*Received"):
        split_address(address, "worker 0")
