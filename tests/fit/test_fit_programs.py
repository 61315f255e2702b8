"""Programs that people write with ``fit``: each runs with one replica and with two, and both give the same numbers."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchstrategy as ts

generator = torch.Generator().manual_seed(0)
X = torch.randn(22, 4, generator=generator)
Y = torch.arange(22) % 3
VALUES = torch.randn(22, 1, generator=generator)
DATA = TensorDataset(X, Y)


def classifier():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def made(strategy, module=classifier, **options):
    torch.manual_seed(0)
    with strategy.scope():
        model = ts.Model(module())
    model.compile(**{"optimizer": "sgd", "loss": nn.CrossEntropyLoss(), **options})
    return model


def made_of(strategy, make, **options):
    torch.manual_seed(0)
    with strategy.scope():
        model = make()
        model.compile(**{"optimizer": "sgd", "loss": nn.CrossEntropyLoss(), **options})
    return model


def fitted(model, x=X, y=Y, **arguments):
    """Return the history. 22 examples in batches of 7 leave a last batch of one, and a replica without any."""
    arguments = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, **arguments).history


def from_data(model, data, **arguments):
    return model.fit(data, **{"epochs": 2, "verbose": 0, **arguments}).history


def average(per_example):
    return ts.nn.compute_average_loss(per_example, global_batch_size="actual")


# --------------------------------------------------------------------------------------------------------------- data


def reads_arrays_of_many_kinds(strategy):
    class Frame:
        """What converts itself to an array, as data frames do."""

        columns = ("a", "b", "c", "d")

        def __init__(self, array):
            self.array, self.shape = array, array.shape

        def __len__(self):
            return len(self.array)

        def __array__(self, dtype=None, copy=None):
            return self.array

        def to_numpy(self):
            return self.array

    kinds = {
        "frames": (Frame(X.numpy()), Frame(Y.numpy())),
        "double": (X.double().numpy(), Y.int().numpy()),
        "views": (X.T.contiguous().T, Y.byte()),
        "strides": (X.numpy()[::-1], Y.numpy()[::-1].copy()),
        "with a graph": (X.clone().requires_grad_(), Y),
    }
    return {name: fitted(made(strategy), *kind) for name, kind in kinds.items()}


def reads_loaders_and_pipelines(strategy):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(X.split(7), Y.split(7), strict=True))

    def endless():
        while True:
            yield from zip(X.numpy()[:21].reshape(3, 7, 4), Y.numpy()[:21].reshape(3, 7), strict=True)

    pipeline = ts.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (2 * x, y)).batch(7)
    return [
        from_data(made(strategy), DataLoader(DATA, batch_size=7, num_workers=1)),
        from_data(made(strategy), Stream()),
        from_data(made(strategy), endless(), steps_per_epoch=4),
        from_data(made(strategy), pipeline.prefetch(1), validation_data=pipeline),
        from_data(made(strategy), pipeline.repeat(), steps_per_epoch=3, validation_data=(X, Y)),
        from_data(made(strategy), DATA, batch_size=7, shuffle=False),
    ]


def predicts_from_a_loader_with_labels(strategy):
    model = made(strategy)
    return model.predict(DataLoader(DATA, batch_size=7), verbose=0), model.predict(X, batch_size=5, verbose=0)


def trains_in_double_precision(strategy):
    return fitted(made(strategy, lambda: classifier().double(), metrics=["accuracy"]), X.double())


def takes_labels_without_the_axis_of_one_output(strategy):
    return fitted(made(strategy, lambda: nn.Linear(4, 1), loss="mse", metrics=["mae"]), X, VALUES[:, 0])


# ------------------------------------------------------------------------------------------------------------- models


def trains_a_recurrent_net(strategy):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    return fitted(made(strategy, Last, metrics=["accuracy"]), X.reshape(22, 2, 2))


def trains_embeddings(strategy):
    def embedding(sparse):
        return lambda: nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3))

    ids = torch.arange(66).reshape(22, 3) % 10
    return [fitted(made(strategy, embedding(sparse)), ids.int(), Y) for sparse in (False, True)]


def trains_a_transformer_on_named_inputs(strategy):
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, ids, mask):
            return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=mask)).transpose(1, 2)

    # Each replica has an example: torch's attention takes no empty batch.
    ids = torch.arange(100).reshape(20, 5) % 11
    mask = torch.arange(5).expand(20, 5) == 4
    return fitted(made(strategy, Transformer, optimizer="adam"), {"ids": ids, "mask": mask}, ids)


def trains_two_outputs_in_a_tuple(strategy):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x):
            return self.left(x), self.right(x)

    model = made(strategy, Two, loss=[nn.CrossEntropyLoss(), "mse"], metrics=[["accuracy"], ["mae"]])
    history = fitted(model, X, (Y, VALUES), validation_split=0.2)
    return history, model.predict(X, verbose=0)


def gives_lazy_layers_their_shapes(strategy):
    return fitted(made(strategy, lambda: nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3))))


def shares_layers_and_leaves_some_unused(strategy):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.head, self.unused = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.twice(torch.tanh(self.twice(x))))

    return fitted(made(strategy, Shared, optimizer="adam"))


def trains_modules_that_are_compiled_already(strategy):
    def compiled_in_place():
        module = classifier()
        module.compile(backend="eager")
        return module

    wrapped = made(strategy, lambda: torch.compile(classifier(), backend="eager"))
    return fitted(wrapped), fitted(made(strategy, compiled_in_place))


def transfers_what_was_learnt(strategy):
    model = made(strategy)
    body = model.module[0]
    body.requires_grad_(False)
    before = body.weight.detach().clone()
    histories = [fitted(model)]
    assert torch.equal(body.weight, before)
    body.requires_grad_(True)
    model.compile("adam", nn.CrossEntropyLoss())
    histories.append(fitted(model))
    assert not torch.equal(body.weight, before)
    return histories


def trains_two_models_of_one_strategy(strategy):
    first, second = made(strategy), made(strategy, optimizer="adam")
    return fitted(first), fitted(second), fitted(first)


# -------------------------------------------------------------------------------------------------------------- steps


class OwnLoss(ts.Model):
    """Keras' custom ``train_step`` with metrics of its own."""

    def __init__(self):
        super().__init__(classifier())
        self.own_loss = ts.metrics.Mean(name="loss")
        self.accuracy = ts.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        return [self.own_loss, self.accuracy]

    def train_step(self, data):
        x, y = data
        y_pred = self(x)
        per_example = F.cross_entropy(y_pred, y, reduction="none")
        self.minimize(average(per_example))
        self.own_loss.update_state(per_example)
        self.accuracy.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class LoopsOverMetrics(ts.Model):
    """Keras 3's custom ``train_step`` with the compiled loss and metrics."""

    def train_step(self, data):
        x, y = data
        y_pred = self(x)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        self.minimize(loss)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Minimizes(ts.Model):
    """The shortest step."""

    def train_step(self, data):
        x, y = data
        loss = average(F.cross_entropy(self(x), y, reduction="none"))
        self.minimize(loss)
        return {"loss": loss}


def shows_the_loss_of_steps_of_ones_own(strategy):
    """The loss that is shown is the mean over examples, in whatever way the step says it."""
    expected = fitted(made(strategy, metrics=["accuracy"]))
    accuracy = [ts.metrics.SparseCategoricalAccuracy(name="accuracy")]
    own = fitted(made_of(strategy, OwnLoss))
    looped = fitted(made_of(strategy, lambda: LoopsOverMetrics(classifier()), metrics=accuracy))
    least = fitted(made_of(strategy, lambda: Minimizes(classifier())))
    assert numbers(own) == pytest.approx(numbers(expected))
    assert looped["loss"] == pytest.approx(expected["loss"])
    assert least["loss"] == pytest.approx(expected["loss"])
    return expected, own, least


class Adversaries(ts.Model):
    """Two networks with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = nn.Linear(2, 4), nn.Linear(4, 1)
        self.maker_loss, self.judge_loss = ts.metrics.Mean("maker_loss"), ts.metrics.Mean("judge_loss")

    def compile(self, maker_optimizer, judge_optimizer):
        super().compile(optimizer=None)
        self.maker_optimizer = maker_optimizer(self.maker.parameters())
        self.judge_optimizer = judge_optimizer(self.judge.parameters())

    def train_step(self, data):
        (real,) = data if isinstance(data, tuple) else (data,)
        made_up = self.maker(real[:, :2])
        for_judge = F.softplus(-self.judge(real)) + F.softplus(self.judge(made_up.detach()))
        self.judge_optimizer.zero_grad()
        average(for_judge).backward()
        self.judge_optimizer.step()
        for_maker = F.softplus(-self.judge(made_up))
        self.maker_optimizer.zero_grad()
        average(for_maker).backward()
        self.maker_optimizer.step()
        self.maker_loss.update_state(for_maker)
        self.judge_loss.update_state(for_judge)
        return {"maker_loss": self.maker_loss, "judge_loss": self.judge_loss}


def trains_adversaries(strategy):
    torch.manual_seed(0)
    with strategy.scope():
        model = Adversaries()
        model.compile(lambda parameters: torch.optim.Adam(parameters, 0.01), lambda p: torch.optim.SGD(p, 0.1))
    return fitted(model, X, None)


class Student(ts.Model):
    def __init__(self, teacher):
        super().__init__(nn.Linear(4, 3))
        self.teacher = teacher

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        with torch.no_grad():
            aim = self.teacher(x)
        return average((y_pred - aim).square().mean(1))


def learns_from_a_teacher(strategy):
    teacher = made(strategy)
    fitted(teacher)
    model = made_of(strategy, lambda: Student(teacher), loss=None)
    return fitted(model), model.evaluate(X, Y, verbose=0)


# ------------------------------------------------------------------------------------------------------------ metrics


def measures_with_torchmetrics(strategy):
    with strategy.scope():
        f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
    several = [f1, torchmetrics.AUROC(task="multiclass", num_classes=3)]
    table = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3)
    collection = torchmetrics.MetricCollection([torchmetrics.Accuracy(task="multiclass", num_classes=3)])
    return [fitted(made(strategy, metrics=metrics)) for metrics in (several, [table], collection)]


def uses_a_metric_in_several_places(strategy):
    with strategy.scope():
        metric = ts.metrics.SparseCategoricalAccuracy()
    first, second = made(strategy, metrics=[metric], weighted_metrics=[metric]), made(strategy, metrics=[metric])
    return fitted(first), fitted(second), fitted(made(strategy, metrics=["accuracy", "accuracy"]))


# ---------------------------------------------------------------------------------------------------------- callbacks


def changes_the_learning_rate(strategy):
    by_epoch, by_step = made(strategy), made(strategy)
    steps = torch.optim.lr_scheduler.StepLR(by_epoch.optimizer, 1, 0.5)
    cycle = torch.optim.lr_scheduler.OneCycleLR(by_step.optimizer, 0.1, total_steps=12)
    callback = ts.callbacks.TorchLRScheduler(cycle, interval="step")
    return fitted(by_epoch, epochs=3, callbacks=[steps]), fitted(by_step, epochs=3, callbacks=[callback])


def evaluates_and_fits_in_callbacks(strategy):
    model, other = made(strategy, metrics=["accuracy"]), made(strategy)
    results = []

    def look(batch, logs):
        if batch == 1:
            results.append(other.evaluate(X, Y, verbose=0))
            results.append(model.predict(X, verbose=0))

    def train_other(epoch, logs):
        results.append(fitted(other))
        results.append(model.evaluate(X, Y, verbose=0))

    callback = ts.callbacks.LambdaCallback(on_train_batch_end=look, on_epoch_end=train_other)
    history = fitted(model, callbacks=[callback])
    assert model.training
    return history, results


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_fit_that_was_interrupted_can_be_followed_by_another(error, devices):
    def interrupt(batch, logs):
        if batch == 1:
            raise error("stop")

    model = made(layout(devices))
    with pytest.raises(error, match="stop"):
        fitted(model, callbacks=[ts.callbacks.LambdaCallback(on_train_batch_end=interrupt)])
    interrupted = model.iterations
    history = fitted(model)
    assert interrupted == 2
    assert model.iterations == 2 + 8
    assert len(history["loss"]) == 2


# ------------------------------------------------------------------------------------------------------------- copies


def goes_on_and_is_copied(strategy):
    model = made(strategy)
    histories = [fitted(model), fitted(model, epochs=4, initial_epoch=2)]
    with strategy.scope():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in [*copies, copy.deepcopy(model)]:
        assert not other.compiled
        other.compile("sgd", nn.CrossEntropyLoss())
        histories += [other.evaluate(X, Y, verbose=0), fitted(other)]
    return histories


def is_saved_and_loaded_elsewhere(strategy, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    model = made(strategy, optimizer="adam", metrics=["accuracy"])
    histories = [fitted(model)]
    model.save(path)
    histories.append(fitted(model))
    with ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).scope():
        elsewhere = ts.models.load_model(path, trust=True)
    histories += [fitted(elsewhere), fitted(ts.models.load_model(path, trust=True))]
    for history in histories[2:]:
        assert numbers(history) == pytest.approx(numbers(histories[1]), rel=1e-5)
    return histories


PROGRAMS = [
    reads_arrays_of_many_kinds,
    reads_loaders_and_pipelines,
    predicts_from_a_loader_with_labels,
    trains_in_double_precision,
    takes_labels_without_the_axis_of_one_output,
    trains_a_recurrent_net,
    trains_embeddings,
    trains_a_transformer_on_named_inputs,
    trains_two_outputs_in_a_tuple,
    gives_lazy_layers_their_shapes,
    shares_layers_and_leaves_some_unused,
    trains_modules_that_are_compiled_already,
    transfers_what_was_learnt,
    trains_two_models_of_one_strategy,
    shows_the_loss_of_steps_of_ones_own,
    trains_adversaries,
    learns_from_a_teacher,
    measures_with_torchmetrics,
    uses_a_metric_in_several_places,
    changes_the_learning_rate,
    evaluates_and_fits_in_callbacks,
    goes_on_and_is_copied,
]


def layout(devices):
    return ts.get_strategy() if devices == 1 else ts.MirroredStrategy([f"cpu:{i}" for i in range(devices)])


def numbers(result):
    """Return all numbers of a nested result."""
    if isinstance(result, dict):
        return [number for name in sorted(result) for number in numbers(result[name])]
    if isinstance(result, (list, tuple)):
        return [number for part in result for number in numbers(part)]
    return np.asarray(result, dtype=float).ravel().tolist()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_two_replicas_give_the_numbers_of_one(program):
    one, two = numbers(program(layout(1))), numbers(program(layout(2)))
    assert one
    assert two == pytest.approx(one, rel=2e-5, abs=1e-6)


def test_a_saved_model_goes_on_under_any_strategy(tmp_path_factory):
    one, two = (numbers(is_saved_and_loaded_elsewhere(layout(n), tmp_path_factory)) for n in (1, 2))
    assert two == pytest.approx(one, rel=2e-5, abs=1e-6)


def fitted_by_the_compiler(devices):
    return numbers(fitted(made(layout(devices), jit_compile=True)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jit_compile_gives_the_numbers_of_eager_mode():
    eager = numbers(fitted(made(layout(1))))
    for devices in (1, 2):
        with ts.testing.ProcessPool(1, timeout_s=400) as pool:  # the compiler leaves threads
            (compiled,) = pool.run(fitted_by_the_compiler, devices)
        assert compiled == pytest.approx(eager, rel=1e-4)
