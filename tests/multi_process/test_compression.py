"""Training with compressed gradients in real processes, against the algorithms written down once more."""

import copy

import pytest
import torch

import torchstrategy as ts
from tests.gradients.test_power_sgd import Reference, start_of
from tests.multi_process import compression_programs as programs
from tests.programs import cpu_devices

PowerSGD = ts.experimental.PowerSGD
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LowRank:
    """Sums of gradients as PowerSGD has them, for one parameter after the other."""

    def __init__(self, rank, start_after):
        self.rank, self.start_after = rank, start_after
        self.references = {}
        self.num_sums = {}

    def __call__(self, k, parts):
        shape = parts[0].shape
        rows, numel = shape[0], parts[0].numel()
        self.num_sums[k] = self.num_sums.get(k, 0) + 1
        is_small = len(shape) < 2 or 2 * self.rank * (rows + numel // rows) > numel
        if is_small or self.num_sums[k] <= self.start_after:
            return sum(parts)
        if k not in self.references:
            self.references[k] = Reference(1, start_of(k, shape, self.rank))
        total = sum(parts).reshape(rows, -1).numpy()
        return torch.from_numpy(self.references[k].step([total])).view(shape)


class Narrow:
    """Sums of gradients in 16 bits: exact in each host, rounded between hosts."""

    def __init__(self, name, hosts):
        self.dtype, self.hosts = DTYPES[name], hosts

    def __call__(self, k, parts):
        sums = [sum(p for p, host in zip(parts, self.hosts, strict=True) if host == h) for h in sorted(set(self.hosts))]
        total = sum(part.to(self.dtype).float() for part in sums)
        return (total.to(self.dtype) if len(sums) > 2 else total).to(parts[0].dtype)


def train_alone(num_replicas, sum_gradients, num_steps=8, start=None, forgotten_at=None):
    """Train in one process of plain torch, with the replicas' gradients summed by a function."""
    torch.set_default_dtype(torch.float64)
    try:
        net = programs.make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if start is not None:
            net.load_state_dict(start["weights"])
            optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
        for step in range(num_steps):
            if step == forgotten_at:
                sum_gradients = LowRank(sum_gradients.rank, sum_gradients.start_after)
            rows = []
            for i in range(num_replicas):
                optimizer.zero_grad()
                programs.backward(net, step, i)
                rows.append([parameter.grad for parameter in net.parameters()])
            optimizer.zero_grad()
            for k, (parameter, column) in enumerate(zip(net.parameters(), zip(*rows, strict=True), strict=True)):
                if any(part is not None for part in column):
                    parts = [torch.zeros_like(parameter) if part is None else part for part in column]
                    parameter.grad = sum_gradients(k, parts)
            optimizer.step()
        return {name: value.detach() for name, value in net.named_parameters()}
    finally:
        torch.set_default_dtype(torch.float32)


def check(results, expected, tolerance):
    for result in results:
        for name, value in expected.items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=tolerance, msg=name)
            assert torch.equal(result["weights"][name], results[0]["weights"][name])


def check_exact_values(results, num_replicas, num_steps=8):
    """Buffers and a user's sums are never compressed."""
    step = 1 + 2.0**-20
    for result in results:
        assert result["sum"] == [num_replicas * step]
        expected = [num_steps * step, num_steps * (num_replicas - 1) / 2]
        assert result["weights"]["seen"].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("size", "per_process"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_power_sgd(process_pool, size, per_process, rank):
    devices = cpu_devices(per_process)
    results = process_pool(size).run(programs.train, PowerSGD(rank, start_after=2), devices)
    check(results, train_alone(size * per_process, LowRank(rank, 2)), 1e-10)
    check_exact_values(results, size * per_process)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("size", "per_process"), [(2, 1), (3, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_16_bits(process_pool, size, per_process, name, overlap):
    results = process_pool(size).run(programs.train, name, cpu_devices(per_process), overlap=overlap)
    hosts = [i // per_process for i in range(size * per_process)]
    exact = train_alone(size * per_process, lambda k, parts: sum(parts))
    expected = train_alone(size * per_process, Narrow(name, hosts))
    check(results, expected, 1e-10)
    check_exact_values(results, size * per_process)
    assert any(not torch.equal(exact[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["auto", "ring"])
@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1)], ids=str)
def test_only_what_travels_between_hosts_is_compressed(hosts, implementation):
    size = len(hosts)
    with ts.testing.ProcessPool(size) as pool:
        results = pool.run(programs.train, "bf16", hosts=hosts, implementation=implementation)
        known = range(size) if implementation == "ring" else hosts  # the ring knows no hosts
        check(results, train_alone(size, Narrow("bf16", known)), 1e-10)
        check_exact_values(results, size)
        results = pool.run(programs.train, PowerSGD(1, start_after=1), hosts=hosts, implementation=implementation)
        check(results, train_alone(size, LowRank(1, 1)), 1e-10)


@pytest.mark.parametrize("compression", ["bf16", PowerSGD(start_after=0)])
def test_in_shared_memory_nothing_is_compressed(process_pool, compression):
    (found, other), exact = (
        process_pool(2).run(programs.train, one, implementation="auto") for one in (compression, None)
    )
    check([found, other], exact[0]["weights"], 0)
    assert any(line.startswith("Gradients are not compressed") and "share" in line for line in found["log"])


def test_one_process_compresses_nothing(caplog):
    with caplog.at_level("INFO", "torchstrategy"):
        ts.MirroredStrategy(["cpu:0", "cpu:1"], communication_options=programs.options("bf16"))
    assert "Gradients are not compressed: there is only one process." in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", PowerSGD(2, start_after=2)])
def test_a_job_that_goes_on_later(process_pool, compression):
    """What PowerSGD remembers is not saved: it begins with sums in full again."""
    first = process_pool(2).run(programs.train, compression)[0]
    results = process_pool(2).run(programs.train, compression, start=first)
    sums = Narrow("bf16", range(2)) if compression == "bf16" else LowRank(2, 2)
    check(results, train_alone(2, sums, start=first), 1e-10)


def test_ranks_that_remember_different_sums_begin_anew(process_pool):
    results = process_pool(3).run(programs.train, PowerSGD(2, start_after=2), forgotten_at=5)
    check(results, train_alone(3, LowRank(2, 2), forgotten_at=5), 1e-10)


@pytest.mark.parametrize(
    ("compression", "first_scale", "scales"),
    [
        # Step 3 has an infinite gradient on one rank.
        (None, 2.0**10, [2**10, 2**10, 2**11, 2**10, 2**10, 2**10, 2**11, 2**11]),
        ("bf16", 2.0**10, [2**10, 2**10, 2**11, 2**10, 2**10, 2**10, 2**11, 2**11]),
        (PowerSGD(1, 1), 2.0**10, [2**10, 2**10, 2**11, 2**10, 2**10, 2**10, 2**11, 2**11]),
    ],
    ids=str,
)
def test_a_scaler_skips_a_step_on_all_ranks(process_pool, compression, first_scale, scales):
    (found, weight), (other, same) = process_pool(2).run(programs.with_scaler, compression, first_scale)
    assert found == other == scales
    assert torch.equal(weight, same)
    assert torch.isfinite(weight).all()


def test_fp16_overflow_makes_a_scaler_skip_on_all_ranks(process_pool):
    """Of three ranks only one has gradients that are too large, and all skip."""
    (found, weight), *others = process_pool(3).run(programs.with_scaler, "fp16", 2.0**14)
    assert found[0] < 2.0**14
    for other, same in others:
        assert other == found
        assert torch.equal(weight, same)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_of_torch(tmp_path, rank):
    """Torch's hook under DDP takes the mean over ranks, and its first two sums are in full, too."""
    for theirs, ours in ts.testing.run_in_processes(programs.beside_ddp, 2, rank, 8, str(tmp_path)):
        for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=f"step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", PowerSGD(start_after=0)], ids=str)
def test_a_rank_that_dies_ends_the_others(process_pool, compression):
    with pytest.raises(ts.testing.RemoteError) as caught:
        process_pool(3).run(programs.dies_while_others_wait, compression)
    for rank in (0, 2):
        assert isinstance(caught.value.errors[rank], ts.errors.ReplicaFailedError)
        assert "Rank 1" in str(caught.value.errors[rank])
