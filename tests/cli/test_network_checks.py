import pytest

from tests.cli.fake_host import FakeHost, make_job, only
from torchstrategy.cli.job_checks import check_host_name, check_interface_settings, check_proxies


def test_a_host_name_with_a_real_address():
    (finding,) = check_host_name(FakeHost(), make_job())
    assert (finding.status, finding.detail) == ("ok", "node0 is 10.0.0.1")


def test_the_loopback_address_that_debian_gives_a_host():
    host = FakeHost(names={"node0": "127.0.1.1"})
    for job in (None, make_job(address="10.0.0.9")):
        (finding,) = check_host_name(host, job)
        assert finding.status == "warn"
        assert "/etc/hosts" in finding.remedy
    (finding,) = check_host_name(host, make_job(address="127.0.0.1"))  # a job of this host alone
    assert finding.status == "ok"


def test_a_host_name_that_does_not_resolve():
    (finding,) = check_host_name(FakeHost(names={}), None)
    assert finding.status == "warn"
    assert "does not resolve" in finding.detail


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "FAIL"),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", "ok"),
        ("TP_SOCKET_IFNAME", "ib0", "FAIL"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "FAIL"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib", "FAIL"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", "FAIL"),
        ("NCCL_SOCKET_IFNAME", "^=eth", "ok"),
    ],
)
def test_interfaces_that_variables_name(variable, value, status):
    finding = only(check_interface_settings(FakeHost(environ={variable: value})), variable)
    assert finding.status == status


def test_interfaces_are_listed():
    (finding,) = check_interface_settings(FakeHost())
    assert finding.detail == "lo, eth0"


def test_proxies_matter_to_the_kubernetes_resolver_only():
    assert list(check_proxies(FakeHost())) == []
    environ = {"HTTPS_PROXY": "http://proxy:3128"}
    (finding,) = check_proxies(FakeHost(environ=environ))
    assert finding.status == "info"
    environ["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
    (finding,) = check_proxies(FakeHost(environ=environ))
    assert finding.status == "warn"
    assert finding.remedy == "export no_proxy=$no_proxy,10.96.0.1"
    environ["no_proxy"] = "localhost, 10.96.0.1"
    (finding,) = check_proxies(FakeHost(environ=environ))
    assert finding.status == "info"
