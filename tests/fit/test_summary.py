"""Model.summary."""

import torch
from torch import nn

import torchstrategy as ts


class Branches(ts.Model):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.right = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Identity()
        self.accuracy = ts.metrics.Mean(name="mean")

    def forward(self, left, right):
        return {"sum": self.left(left) + self.scale * self.right(right), "parts": (left, right)}


def text_of(model, **kwargs):
    kwargs.setdefault("expand_nested", False)
    texts = []
    model.summary(print_fn=texts.append, **kwargs)
    (text,) = texts
    return text


def test_shapes_are_known_after_data_was_seen(capsys):
    model = ts.Model(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 5)), name="net")
    assert "?" in text_of(model)
    model.predict(torch.ones(3, 1, 6, 6), verbose=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.summary()
    assert capsys.readouterr().out.splitlines() == [
        'Model: "net"',
        "-----------------------------------------",
        "Layer (type)     Output shape     Param #",
        "=========================================",
        "0 (Conv2d)       (None, 2, 4, 4)       20",
        "1 (BatchNorm2d)  (None, 2, 4, 4)        4",
        "2 (Flatten)      (None, 32)             0",
        "3 (Linear)       (None, 5)            165",
        "=========================================",
        "Total params: 189 (756.0 B)",
        "Trainable params: 189 (756.0 B)",
        "Non-trainable params: 0 (0.0 B)",
        "Buffers: 5 (24.0 B)",
    ]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nested_layers_own_parameters_and_several_inputs():
    model = Branches()
    model.right.weight.requires_grad_(False)
    x = (torch.ones(3, 2), torch.ones(3, 4))
    model.predict(x, verbose=0)
    lines = text_of(model, expand_nested=True, show_trainable=True).splitlines()
    rows = [line.split(maxsplit=2) for line in lines[4:-4]]
    assert [row[0] for row in rows] == ["(Branches)", "left", "0", "1", "right", "unused"]
    assert lines[4].split()[-2:] == ["27", "partly"]
    assert "{sum: (None, 3), parts: [(None, 2), (None, 4)]}" in lines[4]
    assert lines[6].startswith("  0 (Linear)")
    assert lines[8].split()[-2:] == ["15", "partly"]
    assert lines[9].split() == ["unused", "(Identity)", "?", "0", "-"]  # it is never called
    assert "Trainable params: 12 (48.0 B)" in lines
    assert "Non-trainable params: 15 (60.0 B)" in lines
    collapsed = text_of(model).splitlines()
    assert [line.split()[0] for line in collapsed[4:-4]] == ["(Branches)", "left", "right", "unused"]


def test_under_replicas_each_parameter_counts_once():
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = ts.Model(nn.Sequential(nn.Linear(2, 3)))
        model.compile("sgd", "mse")
    model.fit(torch.ones(4, 2), torch.ones(4, 3), verbose=0)
    assert "0 (Linear)    (None, 3)           9" in text_of(model)


def test_tied_parameters_count_once():
    model = ts.Model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model.module[1].weight = model.module[0].weight
    assert "Total params: 15 " in text_of(model)


class NeedsValues(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x


def test_layers_that_need_values_have_no_shapes():
    model = ts.Model(nn.Sequential(nn.Linear(2, 2), NeedsValues()))
    model.predict(torch.ones(3, 2), verbose=0)
    assert "0 (Linear)       (None, 2)           6\n1 (NeedsValues)  ?" in text_of(model)


def test_lazy_layers_and_large_numbers():
    model = ts.Model(nn.Sequential(nn.LazyLinear(2), nn.Linear(600, 600)))
    text = text_of(model)
    assert "0 (LazyLinear)  ?                   ?" in text
    assert "1 (Linear)      ?             360,600" in text
    assert "Total params: 360,600 (1.4 MB), and those of lazy layers" in text


def test_line_length():
    model = ts.Model(nn.Sequential(nn.Linear(2, 3)))
    assert {len(line) for line in text_of(model, line_length=60).splitlines() if set(line) <= set("-=")} == {60}
    lines = text_of(model, line_length=20).splitlines()
    assert len(lines[1]) < 40
