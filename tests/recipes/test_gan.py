"""The GAN recipe: its training by hand in every hosting, and its command lines in processes of their own."""

import copy
import re
import sys
from pathlib import Path

import gan
import pytest
import torch
from matplotlib.image import imread
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from tests import warm

RECIPE = Path(__file__).parents[2] / "recipes" / "gan.py"
SMALL = ["width=8", "noise_size=4", "epochs=2", "max_steps=4", "save_every=2", "num_samples=13"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
EPOCH = re.compile(r"^Epoch (\d), Generator Loss: ([\d.]+), Discriminator Loss: ([\d.]+)$", re.MULTILINE)
SUMMARY = re.compile(
    r"^Generator loss: [\d.]+ after 2 epochs with (\d) replica\(s\) in [\d.]+ s; files: (.+)$", re.MULTILINE
)
NUM_IMAGES, BATCH_SIZE = 22, 8  # batches of 8, 8 and 6


def make_gan(optimizer=torch.optim.Adam):
    generator, discriminator = gan.make_generator(noise_size=4, width=8), gan.make_discriminator(width=8)
    return gan.Gan(
        generator,
        discriminator,
        optimizer(generator.parameters(), lr=0.01),
        optimizer(discriminator.parameters(), lr=0.01),
    )


def train(devices, discriminator_steps, generator_steps, dtype=torch.float64, optimizer=torch.optim.Adam):
    """Train two epochs on noisy gradients of grey; return the losses, both models' weights and some drawn images."""
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        images = torch.linspace(0, 1, 28).expand(NUM_IMAGES, 1, 28, 28) + 0.1 * torch.randn(NUM_IMAGES, 1, 28, 28)
        data = TensorDataset(images, torch.zeros(NUM_IMAGES))
        strategy = ts.MirroredStrategy(devices)
        loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        image_batches = strategy.experimental_distribute_dataset(loader)
        noise_batches = iter(strategy.experimental_distribute_dataset(gan.Noise(BATCH_SIZE, 4, seed=1)))
        with strategy.scope():
            model = make_gan(optimizer)
        losses = [
            gan.train_epoch(strategy, model, image_batches, noise_batches, discriminator_steps, generator_steps)
            for _ in range(2)
        ]
        state = {**model.generator.state_dict(prefix="g."), **model.discriminator.state_dict(prefix="d.")}
        return losses, state, model.draw(torch.ones(2, 4))
    finally:
        torch.set_default_dtype(dtype_before)


def assert_same(result, expected, atol=1e-10):
    for losses, other in zip(result[0], expected[0], strict=True):
        assert losses == pytest.approx(other, abs=atol)
    torch.testing.assert_close(result[1:], expected[1:], rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_replicas_in_one_process(num_replicas, steps):
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    assert_same(train(devices, *steps), train(["cpu:0"], *steps))


@pytest.mark.slow
@pytest.mark.parametrize("local_devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_two_processes(process_pool, local_devices):
    expected = train(["cpu:0"], 1, 2)
    for result in process_pool(2).run(train, local_devices, 1, 2):
        assert_same(result, expected)


def test_single_precision():
    single = (torch.float32, torch.optim.SGD)
    expected = train(["cpu:0"], 2, 1, *single)
    for num_replicas in (2, 4):
        assert_same(train([f"cpu:{i}" for i in range(num_replicas)], 2, 1, *single), expected, atol=1e-6)


def test_like_plain_torch():
    """The short last batch: the mean over 6 images and the mean over 8 fakes."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = make_gan(torch.optim.SGD)
    generator, discriminator = copy.deepcopy(model.generator), copy.deepcopy(model.discriminator)
    images, noise = torch.rand(6, 1, 28, 28), torch.randn(8, 4)
    (image_batch,) = strategy.experimental_distribute_dataset(images, batch_size=6)
    (noise_batch,) = strategy.experimental_distribute_dataset(noise, batch_size=8)

    strategy.run(model.discriminator_step, args=(image_batch, noise_batch))
    (softplus(-discriminator(images)).mean() + softplus(discriminator(generator(noise))).mean()).backward()
    torch.optim.SGD(discriminator.parameters(), lr=0.01).step()
    torch.testing.assert_close(model.discriminator.state_dict(), discriminator.state_dict(), rtol=0, atol=1e-6)

    strategy.run(model.generator_step, args=(noise_batch,))
    generator.zero_grad()
    softplus(-discriminator(generator(noise))).mean().backward()
    torch.optim.SGD(generator.parameters(), lr=0.01).step()
    torch.testing.assert_close(model.generator.state_dict(), generator.state_dict(), rtol=0, atol=1e-6)


def test_rounds():
    """22 images in batches of 8 are three steps of the discriminator an epoch; each model learns in its own only."""
    calls = []
    model = make_gan()
    model.generator_optimizer.register_step_post_hook(lambda *_: calls.append("g"))
    model.discriminator_optimizer.register_step_post_hook(lambda *_: calls.append("d"))
    images = [(torch.rand(size, 1, 28, 28), None) for size in (8, 8, 6)]
    gan.train_epoch(ts.get_strategy(), model, images, iter(gan.Noise(8, 4, seed=0)), 2, 3)
    assert "".join(calls) == "ddgggd"


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_gradients_do_not_leak():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = make_gan()
    (images,) = strategy.experimental_distribute_dataset(torch.rand(4, 1, 28, 28), batch_size=4)
    (noise,) = strategy.experimental_distribute_dataset(torch.randn(4, 4), batch_size=4)
    strategy.run(model.discriminator_step, args=(images, noise))
    assert gradients(model.generator) == [None] * 12
    before = gradients(model.discriminator)
    strategy.run(model.generator_step, args=(noise,))
    torch.testing.assert_close(gradients(model.discriminator), before, rtol=0, atol=0)
    assert all(grad.abs().sum() > 0 for grad in gradients(model.generator))


def test_noise_begins_anew():
    noise = gan.Noise(3, 2, seed=5)
    first, second = iter(noise), iter(noise)
    batches = [next(first) for _ in range(3)]
    assert all(torch.equal(batch, next(second)) for batch in batches)
    assert not torch.equal(batches[0], batches[1])


def start(folder, *arguments):
    folder.mkdir(exist_ok=True)
    return warm.run([sys.executable, *arguments], folder)


def check_files(run_path):
    assert len(list(run_path.glob("events.out.tfevents.*"))) == 1
    assert (run_path / "learning_curve.png").stat().st_size > 5_000
    assert [path.name for path in run_path.glob("samples_*")] == ["samples_002.png"]
    height, width, _ = imread(run_path / "samples_002.png").shape
    assert (height, width) == (2 * 30, 10 * 30), "13 images in rows of ten, each with a border"
    generator, discriminator = gan.make_generator(4, 8), gan.make_discriminator(8)
    optimizers = {
        "generator_optimizer": torch.optim.Adam(generator.parameters()),
        "discriminator_optimizer": torch.optim.Adam(discriminator.parameters()),
    }
    checkpoint = ts.train.Checkpoint(generator=generator, discriminator=discriminator, **optimizers)
    checkpoint.restore(ts.train.latest_checkpoint(run_path / "checkpoints")).assert_consumed()
    assert all(len(optimizer.state) > 0 for optimizer in optimizers.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_hosting_gives_the_same_result(tmp_path):
    """The same global batches, split or not, end in the same losses; each run has one folder, however many ranks."""
    options = [*SMALL, "discriminator_steps=2"]
    multirun, two, torchrun = (
        start(tmp_path / name, *launcher, str(RECIPE), *more, *options)
        for name, launcher, more in (
            ("multirun", [], ["-m", "strategy=default,one_device", "batch_size_per_replica=30"]),
            ("two", [], ["strategy=mirrored", "strategy.devices=[cpu:0,cpu:1]", "batch_size_per_replica=15"]),
            ("torchrun", TORCHRUN, ["strategy.devices=[cpu:0]", "batch_size_per_replica=15"]),
        )
    )
    first, second = finished(multirun)
    assert (first, second) == (("1", str(sweep_path(tmp_path) / "0")), ("1", str(sweep_path(tmp_path) / "1")))
    expected = losses(multirun)
    assert len(expected) == 4
    assert expected[:2] == expected[2:], "with one replica the strategies agree"
    for process, name in ((two, "two"), (torchrun, "torchrun")):
        ((num_replicas, folder),) = finished(process)
        assert num_replicas == "2"
        assert [str(run) for run in tmp_path.glob(f"{name}/outputs/gan/*")] == [folder]
        check_files(Path(folder))
        for epoch, other in zip(losses(process), expected[:2], strict=True):
            assert epoch == pytest.approx(other, abs=2e-3)  # Adam makes much of float32's rounding
    for _, folder in (first, second):
        check_files(Path(folder))


def sweep_path(folder):
    (sweep,) = folder.glob("multirun/multirun/gan/*")
    return sweep


def finished(process):
    assert process.returncode == 0, process.stderr
    return SUMMARY.findall(process.stdout)


def losses(process):
    return [[float(loss) for loss in epoch] for epoch in EPOCH.findall(process.stdout)]
