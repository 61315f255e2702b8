"""Weights as files of safetensors: other tools read them, they read those of others, and misfits are refused."""

import resource
import signal
import sys

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.fit.test_saving import TwoHeads, assert_same, make, train, weights
from torchstrategy.fit.safetensors_files import read_safetensors, write_safetensors

safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_the_tensors_are_those_of_the_model(tmp_path, devices):
    model = make(devices)
    train(model)
    path = tmp_path / "weights.safetensors"
    model.save_weights(path)
    model.save_weights(tmp_path / "weights.pt")
    found = safetensors.load_file(path)
    assert_same(found, torch.load(tmp_path / "weights.pt", weights_only=True))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"  # which transformers wants
    other = make(devices)
    other.load_weights(path)
    assert_same(weights(other), weights(model))


def test_weights_of_other_tools_are_loaded_on_every_replica(tmp_path):
    plain = nn.Linear(3, 1)
    safetensors.save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = ts.Model(nn.Linear(3, 1))
    model.load_weights(tmp_path / "plain.safetensors")
    first, second = strategy.experimental_local_results(strategy.run(lambda: model.module.weight.detach().clone()))
    assert torch.equal(first, plain.weight)
    assert torch.equal(second, plain.weight)


def test_tied_weights_and_views_are_each_written(tmp_path):
    """The format refuses names that share memory, and does not know strides."""
    model = TwoHeads()
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    model.register_buffer("part", torch.arange(6.0)[2:4])
    model.register_buffer("halves", torch.ones(2, dtype=torch.bfloat16))
    model.save_weights(tmp_path / "weights.safetensors")
    assert_same(safetensors.load_file(tmp_path / "weights.safetensors"), dict(model.state_dict()))
    other = TwoHeads()
    for name in ("turned", "part", "halves"):
        other.register_buffer(name, torch.zeros_like(model.get_buffer(name)))
    other.load_weights(tmp_path / "weights.safetensors")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.first.weight is other.second.weight


def test_what_the_format_cannot_hold_is_refused_and_nothing_is_left(tmp_path):
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"count": 3}

        def set_extra_state(self, state):
            pass

    path = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match=r"tensors only, and not '_extra_state'.*ends in \.pt"):
        ts.Model(Counting(2, 1)).save_weights(path)
    module = nn.Module()
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"can't hold these weights .*ends in \.pt"):
        ts.Model(module).save_weights(path)
    assert not list(tmp_path.iterdir())


def test_numbers_that_memory_holds_otherwise(tmp_path):
    """The conjugate and the negative of a tensor are notes on it, which files don't have."""
    module = nn.Module()
    module.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 4j]).conj())
    module.register_buffer("negative", torch._neg_view(torch.tensor([1.0, 2.0])))
    ts.Model(module).save_weights(tmp_path / "weights.safetensors")
    found = safetensors.load_file(tmp_path / "weights.safetensors")
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert found["negative"].tolist() == [-1, -2]


def test_a_full_disk_is_no_matter_of_the_format(tmp_path):
    model = ts.Model(nn.Linear(1000, 1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            model.save_weights(tmp_path / "weights.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.filename.endswith("weights.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_whole_model_is_no_such_file(tmp_path):
    with pytest.raises(ValueError, match=r"holds weights only.*ends in \.pt, or save_weights"):
        make().save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_misfits_and_damage(tmp_path):
    path = tmp_path / "weights.safetensors"
    safetensors.save_file({"weight": torch.ones(2, 2)}, path)
    model = ts.Model(nn.Linear(3, 1))
    before = weights(model)
    with pytest.raises(ValueError, match=r"lacks weights of the model: .*bias"):
        model.load_weights(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ts.errors.DataLossError, match="is damaged, or no file of safetensors"):
        model.load_weights(path)
    with pytest.raises(ts.errors.NotFoundError):
        model.load_weights(tmp_path / "none.safetensors")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        model.save_weights(path, overwrite=False)
    assert_same(weights(model), before)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    model = ts.Model(nn.Linear(3, 1))
    with pytest.raises(ImportError, match="pip install 'safetensors>="):
        model.save_weights(tmp_path / "weights.safetensors")
    assert not list(tmp_path.iterdir())
    (tmp_path / "weights.safetensors").touch()
    with pytest.raises(ImportError, match="pip install 'safetensors>="):
        model.load_weights(tmp_path / "weights.safetensors")


def test_checkpoints_of_a_fit(tmp_path):
    model = make()
    save = ts.callbacks.ModelCheckpoint(f"{tmp_path}/{{epoch}}.safetensors", save_weights_only=True)
    model.fit(torch.ones(4, 3), torch.ones(4, 1), epochs=2, verbose=0, callbacks=[save])
    assert {"1.safetensors", "2.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    other = make()
    other.load_weights(tmp_path / "2.safetensors")
    assert_same(weights(other), weights(model))


def write_and_read(folder):
    strategy = ts.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = ts.Model(nn.Linear(3, 1))
    model.save_weights(f"{folder}/weights.safetensors")
    other = nn.Linear(3, 1)
    other.load_state_dict(safetensors.load_file(f"{folder}/weights.safetensors"))
    model.load_weights(f"{folder}/weights.safetensors")
    return other.weight.tolist(), model.module.weight.tolist()


def test_processes_write_one_file(process_pool, tmp_path):
    (first, own), second = process_pool(2).run(write_and_read, str(tmp_path))
    assert first == own == second[0] == second[1]
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def test_every_byte_counts(tmp_path):
    """A file with a byte that has changed is refused, or gives what was written: the byte was none of the tensors'."""
    written = {
        "half": torch.arange(3).to(torch.bfloat16),
        "matrix": torch.arange(6.0).view(2, 3),
        "number": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    path = tmp_path / "weights.safetensors"
    write_safetensors(str(path), written)
    content = path.read_bytes()
    num_refused = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            found = read_safetensors(str(path))
        except ts.errors.DataLossError:
            num_refused += 1
        else:
            assert found.keys() == written.keys()
            assert all(torch.equal(found[name], value) for name, value in written.items()), place
    assert num_refused > 0.9 * len(content)
    path.write_bytes(content.replace((7).to_bytes(8, "little"), (8).to_bytes(8, "little")))
    with pytest.raises(ts.errors.DataLossError, match="'number' is not what was written"):
        read_safetensors(str(path))
