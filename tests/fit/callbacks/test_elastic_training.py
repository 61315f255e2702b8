"""One trajectory, whatever the number of replicas and the room that each has."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.checkpoint import preemption
from torchstrategy.experimental import ElasticTraining, TerminationConfig

STRATEGIES = [(1, None), (1, 2), (1, 1), (2, 3), (2, 2), (3, 1), (4, 1), (4, None)]


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(13, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (13,), generator=generator)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Plain(ts.Model):
    """The default divisor, tf's: a share times the number of replicas."""

    def train_step(self, data):
        x, y = data
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        self.minimize(ts.nn.compute_average_loss(losses))


class OfActual(ts.Model):
    def train_step(self, data):
        x, y = data
        loss = ts.nn.scale_mean_loss(nn.functional.cross_entropy(self(x), y))
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        self.minimize(loss + ts.nn.scale_regularization_loss(1e-2 * penalty))


LOSSES = {
    "mean": (ts.Model, nn.CrossEntropyLoss()),
    "weights": (ts.Model, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))),
    "ignored": (ts.Model, nn.CrossEntropyLoss(ignore_index=1)),
    "sum": (ts.Model, nn.CrossEntropyLoss(reduction="sum")),
    "step": (OfActual, None),
}


def fit(folder, num_replicas, room, kind, accumulation=1):
    cls, loss = LOSSES[kind]
    x, y = data()
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model = cls(net())
    metrics = ["accuracy"] if loss is not None else []
    model.compile(
        torch.optim.Adam(model.parameters(), 1e-2), loss, metrics=metrics, gradient_accumulation_steps=accumulation
    )
    elastic = ElasticTraining(folder, max_replica_batch_size=room, save_freq=2)
    checks = {"validation_data": (x, y), "validation_batch_size": 5} if loss is not None else {}
    history = model.fit(x, y, batch_size=6, epochs=2, callbacks=[elastic], verbose=0, **checks)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return weights, history.history


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", LOSSES)
def test_fit(kind, accumulation, tmp_path):
    """Weights, logs and validation; a step of two batches of which the last is partial."""
    expected, logs = fit(tmp_path / "expected", 1, None, kind, accumulation)
    for num_replicas, room in [(1, 2), (2, 3), (3, 1), (4, None)]:
        folder = tmp_path / f"{num_replicas}{room}"
        weights, found = fit(folder, num_replicas, room, kind, accumulation)
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
        assert found.keys() == logs.keys()
        for name, values in logs.items():
            assert found[name] == pytest.approx(values, rel=1e-10), (name, num_replicas, room)


@pytest.mark.parametrize("deletes", [False, True])
def test_the_state_stays_when_fit_is_done(deletes, tmp_path):
    """A job that is started again after its end must not begin anew."""
    trained = []
    for _ in range(2):
        torch.manual_seed(0)
        model = ts.Model(torch.nn.Linear(2, 1))
        model.compile("sgd", "mse")
        counting = ts.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(batch))
        elastic = ElasticTraining(tmp_path / "run", save_freq=2, **({"delete_checkpoint": True} if deletes else {}))
        data = torch.ones(6, 2), torch.ones(6, 1)
        history = model.fit(*data, batch_size=2, epochs=2, callbacks=[counting, elastic], verbose=0)
        assert len(history.history["loss"]) == 2
        assert (tmp_path / "run").exists() != deletes
        if deletes:
            break
    assert trained == [0, 1, 2] * 2


def test_the_default_divisor_is_that_of_the_whole_step(tmp_path):
    """Of shares that are all alike, for which it is meant."""
    ends = []
    for num_replicas, room in ((1, None), (1, 2), (2, 1)):
        strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        with strategy.scope():
            model = Plain(net())
        model.compile("sgd")
        elastic = ElasticTraining(tmp_path / f"{num_replicas}{room}", max_replica_batch_size=room)
        x, y = data()
        model.fit(x[:12], y[:12], batch_size=6, callbacks=[elastic], verbose=0)
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-12, atol=1e-14)


def loop(folder, num_replicas, room, divisor, epochs=2, stop_after=None):
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    examples, order = torch.utils.data.TensorDataset(*data()), torch.Generator().manual_seed(4)
    loader = torch.utils.data.DataLoader(examples, batch_size=6, shuffle=True, generator=order)
    dataset = strategy.experimental_distribute_dataset(loader)
    elastic = ElasticTraining(folder, max_replica_batch_size=room, save_freq=1)
    sizes = []

    def step(x, y):
        optimizer.zero_grad()
        for own_x, own_y in elastic.micro_batches((x, y)):
            sizes.append(len(own_x))
            losses = nn.functional.cross_entropy(model(own_x), own_y, reduction="none")
            ts.nn.compute_average_loss(losses, global_batch_size=divisor).backward()
        assert ts.get_replica_context().num_replicas_in_sync == 1 or ts.get_replica_context().batch_shares.total <= 6
        optimizer.step()

    def whole_step(batch):
        strategy.run(step, args=batch)
        scheduler.step()

    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, dataset=dataset)
    with elastic.handler(checkpoint) as handler:
        while handler.total_run_calls < 3 * epochs:
            for batch in dataset:
                handler.run(whole_step, batch)
                if handler.total_run_calls == stop_after:
                    return None
    assert room is None or max(sizes) <= room
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("divisor", ["actual", 6])
def test_loop(divisor, tmp_path):
    expected = loop(tmp_path / "1", 1, None, divisor)
    for num_replicas, room in STRATEGIES[1:]:
        found = loop(tmp_path / f"{num_replicas}{room}", num_replicas, room, divisor)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_loop_with_numbers_of_replicas_that_change(tmp_path):
    expected = loop(tmp_path / "1", 1, None, "actual")
    for number, (num_replicas, room) in enumerate([(4, None), (2, 2), (1, 4), (3, 1)]):
        stop_after = [1, 3, 4, None][number]
        found = loop(tmp_path / "changing", num_replicas, room, "actual", stop_after=stop_after)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class ByHand(ts.Model):
    def train_step(self, data):
        x, y = data
        self.optimizer.zero_grad()
        ts.nn.scale_mean_loss(nn.functional.cross_entropy(self(x), y)).backward()
        self.optimizer.step()


class Clears(ts.Model):
    def train_step(self, data):
        x, y = data
        self.optimizer.zero_grad()
        self.minimize(ts.nn.scale_mean_loss(nn.functional.cross_entropy(self(x), y)))


class ClearsInPlace(ts.Model):
    def train_step(self, data):
        x, y = data
        self.optimizer.zero_grad(set_to_none=False)
        self.minimize(ts.nn.scale_mean_loss(nn.functional.cross_entropy(self(x), y)))


class OfItsOwn(ts.Model):
    """Steps an optimizer that compile was not given."""

    def __init__(self, module):
        super().__init__(module)
        self.__dict__["own"] = torch.optim.SGD(self.parameters(), 0.1)

    def train_step(self, data):
        x, y = data
        self.own.zero_grad()
        ts.nn.scale_mean_loss(nn.functional.cross_entropy(self(x), y)).backward()
        self.own.step()


class Masks(ts.Model):
    """Ignores other labels than the data does."""

    def train_step(self, data):
        x, y = data
        y = torch.where(x[:, 0] > 0, y, -100)
        self.minimize(self.compute_loss(x, y, self(x)))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ByHand, "stepped before the last"),
        (OfItsOwn, "stepped before the last"),
        (Clears, "batches before this one were cleared"),
        (ClearsInPlace, "batches before this one were cleared"),
    ],
)
def test_steps_that_would_lose_a_part(cls, message, tmp_path):
    model = cls(net())
    model.compile("sgd")
    elastic = ElasticTraining(tmp_path, max_replica_batch_size=2)
    with pytest.raises(RuntimeError, match=message):
        model.fit(*data(), batch_size=6, callbacks=[elastic], verbose=0)
    model.fit(*data(), batch_size=6, verbose=0)  # the limit has ended with the other fit


def test_labels_that_a_step_changes(tmp_path):
    """Of one batch the loss counts them itself; of several parts nobody knows what the others count."""
    for room, raises in ((None, False), (2, True)):
        model = Masks(net())
        model.compile("sgd", nn.CrossEntropyLoss())
        elastic = ElasticTraining(tmp_path / str(room), max_replica_batch_size=room)
        with pytest.raises(ValueError, match="not those of the data") if raises else contextlib.nullcontext():
            model.fit(*data(), batch_size=6, callbacks=[elastic], verbose=0)


class Shows(ts.Model):
    def train_step(self, data):
        x, y = data
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        self.minimize(ts.nn.compute_average_loss(losses, global_batch_size="actual"))
        return {"mine": losses.detach().mean(), "rows": float(x[:, 0].mean())}


def test_numbers_that_a_step_returns(tmp_path):
    ends = []
    for num_replicas, room in STRATEGIES:
        strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        with strategy.scope():
            model = Shows(net())
        model.compile("sgd")
        elastic = ElasticTraining(tmp_path / f"{num_replicas}{room}", max_replica_batch_size=room)
        ends.append(model.fit(*data(), batch_size=5, callbacks=[elastic], verbose=0).history)  # the last has 3
    for end in ends[1:]:
        for name, values in ends[0].items():
            assert end[name] == pytest.approx(values, rel=1e-10), name


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_batch_that_the_step_has_changed(num_replicas, tmp_path):
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    dataset = strategy.experimental_distribute_dataset(torch.arange(6.0), batch_size=6)
    elastic = ElasticTraining(tmp_path, max_replica_batch_size=2)

    def step(x):
        parts = elastic.micro_batches(2 * x)
        return sum(ts.nn.compute_average_loss(part, global_batch_size="actual") for part in parts)

    assert float(strategy.reduce("sum", strategy.run(step, args=(next(iter(dataset)),)))) == pytest.approx(5.0)


@pytest.mark.parametrize("divisor", [3, "tensor"])
def test_divisors_that_are_counted_in_a_part_are_warned_of(divisor, tmp_path):
    elastic = ElasticTraining(tmp_path, max_replica_batch_size=3)
    strategy = ts.MirroredStrategy(["cpu:0"])
    (batch,) = strategy.experimental_distribute_dataset(torch.ones(6), batch_size=6)

    def step(batch):
        for part in elastic.micro_batches(batch):
            ts.nn.compute_average_loss(part, global_batch_size=torch.tensor(3) if divisor == "tensor" else divisor)

    with pytest.warns(UserWarning, match=r"(parts of one optimizer step|parts of this step have 6 examples)"):
        strategy.run(step, args=(batch,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_replica_batch_size": 0}, "positive number of examples"),
        ({"max_replica_batch_size": 2.0}, "positive number of examples"),
        ({"save_freq": "epoch"}, "positive number of batches"),
        ({"save_freq": 0}, "save_freq"),
    ],
)
def test_arguments(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ElasticTraining(tmp_path, **options)


def test_outside_of_a_replica(tmp_path):
    elastic = ElasticTraining(tmp_path, max_replica_batch_size=2)
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope(), pytest.raises(RuntimeError, match="cross-replica context"):
        list(elastic.micro_batches(torch.ones(4)))


def test_a_batch_of_unknown_shares(tmp_path):
    elastic = ElasticTraining(tmp_path, max_replica_batch_size=2)
    with pytest.raises(RuntimeError, match="actual batch size is not known"):
        ts.MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda: list(elastic.micro_batches(torch.ones(4))))


def test_in_a_thread(tmp_path, caplog):
    """Ray's workers train in one."""
    ends = []
    with caplog.at_level("INFO", "torchstrategy"):
        thread = threading.Thread(
            target=lambda: ends.extend([loop(tmp_path / "loop", 1, 2, 6), fit(tmp_path, 1, 2, "mean")])
        )
        thread.start()
        thread.join()
    assert len(ends) == 2
    assert caplog.text.count("signals are not noticed in this thread") == 2


@pytest.mark.parametrize("kind", ["fit", "loop"])
def test_a_function_is_asked_in_a_thread(kind, tmp_path, monkeypatch):
    """As Ray's workers are told that a node will be taken away."""
    monkeypatch.setattr(preemption, "_POLL_S", 0.01)
    told = threading.Event()
    done, pace = [], [0.01]

    def note(*_):
        done.append(time.sleep(pace[0]))
        if len(done) == 3:
            told.set()

    def train():
        config = TerminationConfig(termination_watcher_fn=told.is_set)
        elastic = ElasticTraining(tmp_path, save_freq=10_000, termination_config=config)
        model = ts.Model(nn.Linear(1, 1))
        if kind == "fit":
            model.compile("sgd", "mse")
            callbacks = [elastic, ts.callbacks.LambdaCallback(on_train_batch_begin=note)]
            model.fit(torch.ones(500, 1), torch.ones(500, 1), batch_size=1, callbacks=callbacks, verbose=0)
        else:
            with elastic.handler(ts.train.Checkpoint(model=model)) as handler:
                while handler.total_run_calls < 500:
                    handler.run(note)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(SystemExit, match="143"):
            pool.submit(train).result(60)
        assert 3 <= len(done) < 500
        told.clear()
        pace[0] = 0.0
        pool.submit(train).result(60)
    assert len(done) == 500  # nothing is lost, and nothing is done twice
