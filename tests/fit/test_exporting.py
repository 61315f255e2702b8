"""Model.export: a program that torch alone runs, for batches of any size."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


class Named(ts.Model):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, image, *, scale):
        return {"scaled": self.layer(image) * scale, "image": image}


class Pair(ts.Model):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, first, second):
        return self.layer(first) - self.layer(second)


def load(path):
    return torch.export.load(path).module()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_inputs_as_seen_in_fit(tmp_path, devices):
    with (ts.MirroredStrategy(devices) if devices else ts.get_strategy()).scope():
        model = ts.Model(net())
        model.compile("adam", "mse")
    model.fit(X, torch.ones(5, 2), verbose=0)
    model.export(tmp_path / "model.pt2")
    program = load(tmp_path / "model.pt2")
    for size in (1, 2, 5):
        np.testing.assert_allclose(program(X[:size]).detach(), model.predict(X[:size], verbose=0), rtol=1e-5)
    assert os.listdir(tmp_path) == ["model.pt2"]
    assert model.module.training


@pytest.mark.slow
def test_torch_runs_it_without_this_library(tmp_path):
    ts.Model(net()).export(tmp_path / "model.pt2", X)
    program = """
        import sys, torch
        print(tuple(torch.export.load(sys.argv[1]).module()(torch.ones(7, 3)).shape))
        assert "torchstrategy" not in sys.modules
        """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), str(tmp_path / "model.pt2")]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60, text=True).stdout == "(7, 2)\n"


def test_named_inputs_and_outputs(tmp_path):
    model = Named()
    model.export(tmp_path / "model.pt2", {"image": X, "scale": torch.ones(5, 1)})
    result = load(tmp_path / "model.pt2")(image=X[:2], scale=torch.full((2, 1), 2.0))
    torch.testing.assert_close(result["scaled"], 2 * model.layer(X[:2]))
    assert torch.equal(result["image"], X[:2])


@pytest.mark.parametrize("seen", [True, False])
def test_several_inputs(tmp_path, seen):
    model = Pair()
    if seen:
        model.predict((X, X), verbose=0)
    model.export(tmp_path / "model.pt2", None if seen else (X[:1].numpy(), X[:1]))  # one example will do
    torch.testing.assert_close(load(tmp_path / "model.pt2")(X, X + 1), model(X, X + 1))


class Flattened(nn.Module):
    def forward(self, x):
        return x.reshape(len(x.tolist()), -1) if x.shape[0] == 5 else x.sum(1)


class DependsOnValues(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


class FixedSize(nn.Module):
    def forward(self, x):
        return x + torch.arange(5.0)[:, None] if x.shape[0] == 5 else x


def test_a_batch_size_that_matters(tmp_path):
    model = ts.Model(FixedSize())
    with pytest.raises(RuntimeError, match=r"FixedSize can't be exported for batches of any size.*dynamic_batch=False"):
        model.export(tmp_path / "model.pt2", X)
    assert os.listdir(tmp_path) == []
    model.export(tmp_path / "model.pt2", X, dynamic_batch=False)
    torch.testing.assert_close(load(tmp_path / "model.pt2")(X), model(X))


def test_what_can_not_be_exported_says_why(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"can't trace DependsOnValues with the inputs .*float32\[5, 3\].*values of tens"
    ):
        ts.Model(DependsOnValues()).export(tmp_path / "model.pt2", X)


def test_no_inputs_and_different_batch_sizes(tmp_path):
    with pytest.raises(ValueError, match=r"the model has seen no data yet.*example_inputs=x"):
        ts.Model(net()).export(tmp_path / "model.pt2")
    with pytest.raises(ValueError, match="must have one batch size"):
        Pair().export(tmp_path / "model.pt2", (X, X[:1]))


def test_overwrite(tmp_path):
    (tmp_path / "model.pt2").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        ts.Model(nn.Linear(3, 2)).export(tmp_path / "model.pt2", X, overwrite=False)
    assert (tmp_path / "model.pt2").read_text() == "mine"


def export(path):
    with ts.MultiWorkerMirroredStrategy().scope():
        model = ts.Model(net())
    model.export(path, X)
    return os.path.isfile(path)


@pytest.mark.slow
def test_processes_export_as_one(process_pool, tmp_path):
    assert process_pool(2).run(export, str(tmp_path / "model.pt2")) == [True, True]


@pytest.mark.slow
def test_a_forward_with_keras_argument_is_exported_in_evaluation_mode(tmp_path):
    class Halved(nn.Linear):
        def forward(self, x, training=True):
            return super().forward(x) * (0.5 if training else 1.0)

    model = ts.Model(Halved(3, 2))
    model.export(tmp_path / "model.pt2", example_inputs=X)
    np.testing.assert_allclose(load(tmp_path / "model.pt2")(X).detach(), model.predict(X, verbose=0), rtol=1e-5)
    assert not model.module._forward_pre_hooks
