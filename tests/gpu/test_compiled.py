"""Compiled models and steps on one GPU: the numbers of plain torch, and no compilation in later steps."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torchstrategy as ts
from tests.gpu.training import ACCELERATORS, DEVICES, make_data, make_net, train
from tests.programs import assert_equal


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_function(device):
    """``ts.function`` compiles modules on a GPU; on a CPU it leaves them alone."""
    found = train(device, ts.OneDeviceStrategy(device), dtype=torch.float32, wrap=ts.function)
    assert_equal(found, train(device, None, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("device", ACCELERATORS)
def test_a_step_function_with_mixed_precision(device):
    options = {"dtype": torch.float32, "autocast": torch.bfloat16}
    found = train(device, ts.OneDeviceStrategy(device), wrap=ts.function, **options)
    assert_equal(found, train(device, None, **options), 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_model_is_compiled_for_the_first_batches_only(device):
    """Once for the full batches, and once for the short one."""
    torch._dynamo.reset()
    compiler = CompileCounterWithBackend("inductor" if device == "cuda:0" else "aot_eager")
    strategy = ts.OneDeviceStrategy(device)
    with strategy.scope():
        model = make_net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compiled = torch.compile(model, backend=compiler)

    def step(x, y):
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss((compiled(x) - y).square().mean(1), global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    counts = []
    for _ in range(3):
        for inputs in strategy.experimental_distribute_dataset(make_data(torch.float32), batch_size=5):
            strategy.run(step, args=tuple(inputs))
        counts.append(compiler.frame_count)
    torch._dynamo.reset()
    assert counts == [2, 2, 2]
