"""4 -> 2 -> 3 processes, by kills and by a host that comes: one trajectory, and each example once an epoch."""

import pytest
import torch

import torchstrategy as ts
from tests.multi_worker.elastic_jobs import EPOCHS, NUM_EXAMPLES, STEPS_AN_EPOCH, Launchers, train
from torchstrategy.base.addresses import ReservedPorts

LAUNCHERS = {
    "launch": ["torchstrategy", "launch"],
    "torchrun": ["torch.distributed.run", "--rdzv-backend=c10d", "--monitor-interval=0.2"],
}


@pytest.fixture
def job(request, tmp_path):
    launcher, kind = request.param
    with ReservedPorts(1) as ports:
        port = ports.numbers[0]
    job = Launchers(LAUNCHERS[launcher], kind, tmp_path, port)
    yield job
    job.close()


@pytest.mark.slow
@pytest.mark.timeout(550)
@pytest.mark.parametrize(
    "job", [("launch", "fit"), ("torchrun", "loop")], indirect=True, ids=["launch-fit", "torchrun-loop"]
)
def test_four_two_three(job, tmp_path_factory, request):
    for _ in range(4):
        job.start()
    job.wait_for(4)
    job.kill(2)
    job.kill(3)
    job.wait_for(2)
    job.start()
    job.wait_for(3)
    job.finish([0, 1, 4])

    records = job.records()
    assert {size for _, _, size, _, _ in records} >= {4, 2, 3}
    final = {step: round_ for _, round_, _, step, _ in records}  # the round that came to a step last
    assert sorted(final) == list(range(EPOCHS * STEPS_AN_EPOCH))
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_AN_EPOCH, (epoch + 1) * STEPS_AN_EPOCH)
        ids = [id_ for _, round_, _, step, own in records if step in steps and final[step] == round_ for id_ in own]
        assert sorted(ids) == list(range(NUM_EXAMPLES)), epoch

    kind = job._arguments[2]
    folder = tmp_path_factory.mktemp("alone")
    (folder / "fast").touch()
    expected = train(kind, folder, ts.OneDeviceStrategy("cpu"))
    torch.testing.assert_close(torch.load(job.folder / "weights.pt"), expected, rtol=1e-10, atol=1e-12)
