"""Several hosts that drive their devices together, by stand-ins: what they would compile differently is refused."""

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.base.devices import Placement
from torchstrategy.base.values import BatchShares
from torchstrategy.testing.processes import RemoteError
from torchstrategy.tpu.groups import compare_programs, describe_program, make_groups

HOSTS = [Placement(2, first, (torch.device("cpu"),), replicas_per_copy=1) for first in (0, 1)]


def shared(rows, shares):
    return ts.PerReplica([torch.zeros(rows, 8)], BatchShares(shares))


def test_equal_shares_are_one_group_on_every_host():
    found = [make_groups(None, host, (shared(3, (3, 3)), {}), [BatchShares((3, 3))]) for host in HOSTS]
    assert [groups.group_of for groups in found] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("host", HOSTS)
def test_uneven_shares_are_refused_on_every_host(host):
    rows = (3, 1)[host.first_replica]
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"shares of \[3, 1\]. Drop the last batch.*torchrun"):
        make_groups(None, host, (shared(rows, (3, 1)), {}), [BatchShares((3, 1))])


def test_other_arguments_must_have_one_shape():
    host = Placement(4, 2, (torch.device("cpu"),), replicas_per_copy=2)
    values = ts.PerReplica([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(ts.errors.InvalidArgumentError, match="arguments of 2 different shapes"):
        make_groups(None, host, (values, {}), [])


def step(x):
    return x


def test_a_program_is_described_by_all_that_is_compiled():
    layer = nn.Linear(2, 1)
    arguments = ((ts.PerReplica([torch.zeros(3, 2)] * 2), 0.5), {"y": torch.zeros(1, dtype=torch.int64)})
    text = describe_program(step, arguments, layer.parameters())
    assert "PerReplica((3, 2) torch.float32); float; (1,) torch.int64; (1, 2) torch.float32; (1,) torch.float32" in text
    assert text.startswith("step; ")
    others = [
        describe_program(lambda x: x, arguments, layer.parameters()),
        describe_program(step, ((arguments[0][0], 1), {}), layer.parameters()),
        describe_program(step, arguments, nn.Linear(2, 2).parameters()),
        describe_program(step, ((ts.PerReplica([torch.zeros(2, 2)] * 2), 0.5), arguments[1]), layer.parameters()),
    ]
    assert len({text, *others}) == 5


def compare(texts):
    runtime = ts.TPUStrategy().runtime
    before = runtime.num_compilations()
    for _ in range(2):
        compare_programs(runtime, texts)
    return runtime.num_compilations() - before


def test_hosts_compare_their_programs(xla_process):
    assert xla_process(4).run(compare, ["step"] * 4) <= 2
    with pytest.raises(RemoteError, match=r"(?s)DisagreementError.*This host, 0: step; 3 rows"):
        xla_process(4).run(compare, ["step; 3 rows"] * 2 + ["step; 1 row"] * 2)


def first_run_over_hosts():
    """Let the strategy take its four devices for half of eight: the first run compares, before it traces."""
    strategy = ts.TPUStrategy()
    strategy.hosting._placement = Placement(8, 0, strategy.placement.devices, replicas_per_copy=4)
    strategy.hosting.num_replicas = 8
    seen = []
    upload = strategy.runtime.upload

    def note(rows):
        seen.append([int(row) for row in rows])
        return upload([row + i for i, row in enumerate(rows)])

    strategy.runtime.upload = note
    try:
        strategy.run(step, args=(torch.zeros(2),))
    except ts.errors.DisagreementError:
        return len(seen), len(set(seen[0]))
    finally:
        strategy.runtime.upload = upload


def test_the_first_run_compares(xla_process):
    assert xla_process(4).run(first_run_over_hosts) == (1, 1)
