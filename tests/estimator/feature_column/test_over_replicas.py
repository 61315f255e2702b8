"""Features with strings on their way through loaders and strategies, and models of columns over replicas."""

import numpy as np
import pytest
import torch

import torchstrategy as ts

fc = ts.feature_column
DEVICES = ["cpu:0", "cpu:1"]
CITIES = ["Bonn", "Ulm", "", "Rome", "Ulm", "Bonn", "Kiel", "Rome"]
TAGS = [["new"], [], ["hot", "new"], ["hot"], ["old"], ["new", "new"], [], ["hot"]]


def features():
    tags = np.empty(len(TAGS), dtype=object)
    tags[:] = TAGS
    return {"size": torch.arange(8.0), "city": np.array(CITIES), "tags": tags, "name": list("abcdefgh")}


def make_model():
    torch.manual_seed(0)
    city = fc.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm", "Rome"])
    tags = fc.categorical_column_with_vocabulary_list("tags", ["new", "hot"], num_oov_buckets=1)
    name = fc.categorical_column_with_hash_bucket("name", 5)
    layer = fc.DenseFeatures(
        [
            fc.numeric_column("size"),
            fc.indicator_column(city),
            fc.embedding_column(tags, 3),
            fc.embedding_column(fc.crossed_column([city, name.key], 20), 2),
        ]
    )
    return torch.nn.Sequential(layer, torch.nn.Linear(layer.output_size, 1))


LABELS = torch.linspace(-1, 1, 8)[:, None]


def train(strategy, batches, steps=3):
    """Return the model's state after some steps of gradient descent on the mean over the global batch."""
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        losses = (model(x) - y).square().flatten()
        ts.nn.compute_average_loss(losses, global_batch_size=8).backward()
        optimizer.step()

    dataset = strategy.distribute_datasets_from_function(
        lambda context: batches[context.input_pipeline_id :: context.num_input_pipelines]
    )
    for _ in range(steps):
        for batch in dataset:
            strategy.run(step, args=(batch,))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def rows(start, stop):
    return {key: value[start:stop] for key, value in features().items()}, LABELS[start:stop]


@pytest.mark.parametrize("make", [ts.MirroredStrategy, ts.experimental.CentralStorageStrategy])
def test_replicas_train_as_one(make):
    alone = train(ts.OneDeviceStrategy("cpu:0"), [rows(0, 8)])
    assert any(not torch.equal(value, make_model().state_dict()[name]) for name, value in alone.items())
    together = train(make(DEVICES), [rows(0, 4), rows(4, 8)])
    torch.testing.assert_close(together, alone)


def train_in_process():
    return train(ts.MirroredStrategy(["cpu:0"]), [rows(0, 4), rows(4, 8)])


def test_processes_train_as_one(process_pool):
    alone = train(ts.OneDeviceStrategy("cpu:0"), [rows(0, 8)])
    for together in process_pool(2).run(train_in_process):
        torch.testing.assert_close(together, alone)


def predict_in_process():
    strategy = ts.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = make_model()
    dataset = strategy.distribute_datasets_from_function(
        lambda context: [features()] if context.input_pipeline_id == 0 else []
    )
    return [tuple(strategy.run(model, args=(batch,)).shape) for batch in dataset]


def test_a_process_without_data(process_pool):
    assert process_pool(2).run(predict_in_process) == [[(8, 1)], [(0, 1)]]


def test_a_global_batch_is_divided_with_its_strings():
    strategy = ts.MirroredStrategy(devices=DEVICES)
    dataset = strategy.experimental_distribute_dataset([features()])
    (batch,) = list(dataset)
    model = make_model()
    shares = strategy.experimental_local_results(strategy.run(model, args=(batch,)))
    assert [len(share) for share in shares] == [4, 4]
    torch.testing.assert_close(torch.cat(shares), model(features()))


def test_replicas_without_examples():
    strategy = ts.MirroredStrategy(devices=DEVICES)
    dataset = strategy.distribute_datasets_from_function(lambda _: [rows(0, 8)[0]])
    (batch,) = list(dataset)
    with strategy.scope():
        model = make_model()
    shares = strategy.experimental_local_results(strategy.run(model, args=(batch,)))
    assert [tuple(share.shape) for share in shares] == [(8, 1), (0, 1)]


def test_through_a_loader():
    examples = [({"size": float(i), "city": CITIES[i]}, i) for i in range(8)]
    loader = torch.utils.data.DataLoader(examples, batch_size=4)
    model = fc.LinearModel([fc.numeric_column("size"), fc.categorical_column_with_vocabulary_list("city", ["Ulm"])])
    with torch.no_grad():
        model._parameters["linear_model/city/weights"].fill_(10.0)
    out = [model(x).flatten().tolist() for x, _ in loader]
    assert out == [[0.0, 10.0, 0.0, 0.0], [10.0, 0.0, 0.0, 0.0]]


def test_through_a_dataset():
    dataset = ts.data.Dataset.from_tensor_slices({"city": np.array(CITIES)}).batch(4)
    column = fc.indicator_column(fc.categorical_column_with_vocabulary_list("city", ["Ulm"]))
    out = [fc.DenseFeatures(column)(batch).flatten().tolist() for batch in dataset]
    assert out == [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


def test_fit_reads_a_dictionary_with_strings():
    strategy = ts.MirroredStrategy(devices=DEVICES)
    with strategy.scope():
        model = ts.Model(make_model())
    model.compile(optimizer=torch.optim.SGD(model.parameters(), 0.05), loss="mse")
    batches = [(features(), LABELS)]
    history = model.fit(batches, epochs=3, verbose=0).history["loss"]
    assert history[2] < history[0]
    expected = train(ts.OneDeviceStrategy("cpu:0"), [rows(0, 8)])
    torch.testing.assert_close({name.removeprefix("module."): x for name, x in model.state_dict().items()}, expected)


@pytest.mark.end_to_end
def test_parameter_servers_train_as_one_process(local_cluster):
    strategy = ts.ParameterServerStrategy(local_cluster(num_workers=1, num_ps=2).resolver())
    with strategy.scope():
        model = ts.Model(make_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit([rows(0, 8)], epochs=3, verbose=0)
    expected = train(ts.OneDeviceStrategy("cpu:0"), [rows(0, 8)])
    torch.testing.assert_close({name.removeprefix("module."): x for name, x in model.state_dict().items()}, expected)
