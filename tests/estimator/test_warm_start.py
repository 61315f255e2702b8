"""Initial values from another model's checkpoint."""

import pytest
import torch

import torchstrategy as ts

CPUS = ["cpu:0", "cpu:1"]


class Net(torch.nn.Module):
    def __init__(self, num_words=3, second="head"):
        super().__init__()
        self.words = torch.nn.Embedding(num_words, 2)
        self.add_module(second, torch.nn.Linear(2, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.second = second

    def forward(self, features):
        return self.get_submodule(self.second)(self.words(features)).squeeze(1)


def estimator_of(folder, warm_start_from=None, strategy=None, learning_rate=0.0, **net):
    def model_fn(features, labels, mode):
        module = Net(**net)
        return ts.estimator.EstimatorSpec(
            mode,
            module=module,
            loss=lambda outputs, labels: outputs.mean(),
            train_op=torch.optim.SGD(module.parameters(), lr=learning_rate),
        )

    config = ts.estimator.RunConfig(train_distribute=strategy)
    return ts.estimator.Estimator(model_fn, str(folder), config, warm_start_from=warm_start_from)


def input_fn():
    return [torch.tensor([0, 1])] * 2


def value(estimator, name):
    return torch.tensor(estimator.get_variable_value(name))


@pytest.fixture
def first(tmp_path):
    return estimator_of(tmp_path / "first", learning_rate=0.1).train(input_fn)


@pytest.mark.parametrize("strategy", [None, CPUS])
def test_all_parameters_are_taken_from_a_directory(tmp_path, first, strategy):
    strategy = strategy and ts.MirroredStrategy(strategy)
    second = estimator_of(tmp_path / "second", first.model_dir, strategy).train(input_fn)
    for name in ("words.weight", "head.weight", "head.bias"):
        assert torch.equal(value(second, name), value(first, name))
    assert second.get_variable_value("global_step") == (2 if strategy is None else 1)


def test_a_checkpoint_of_its_own_comes_first(tmp_path, first):
    second = estimator_of(tmp_path / "second", first.latest_checkpoint(), learning_rate=1.0).train(input_fn)
    before = value(second, "head.bias")
    second.train(input_fn, steps=1)
    assert value(second, "head.bias") == before - 1.0


@pytest.mark.parametrize(("chosen", "taken"), [("words", True), (["head"], False), (None, False), ("eight", False)])
def test_variables_are_chosen_by_expressions(tmp_path, first, chosen, taken, caplog):
    settings = ts.estimator.WarmStartSettings(first.model_dir, vars_to_warm_start=chosen)
    second = estimator_of(tmp_path / "second", settings).train(input_fn)
    assert torch.equal(value(second, "words.weight"), value(first, "words.weight")) == taken
    assert ("matches no variable of the model" in caplog.text) == (chosen == "eight")


def test_buffers_are_taken_by_a_list_only(tmp_path):
    class Seen(torch.nn.Module):
        def __init__(self, start):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(start))
            self.register_buffer("seen", torch.tensor(start))

        def forward(self, features):
            return features * self.w

    def of(folder, start, settings=None):
        def model_fn(features, labels, mode):
            module = Seen(start)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
            loss = torch.nn.functional.mse_loss
            return ts.estimator.EstimatorSpec(
                mode, module=module, loss=lambda out, labels: loss(out, out * 0), train_op=optimizer
            )

        estimator = ts.estimator.Estimator(model_fn, str(tmp_path / folder), warm_start_from=settings)
        estimator.train(lambda: [torch.ones(1)])
        return [float(estimator.get_variable_value(name)) for name in ("w", "seen")]

    assert of("first", 1.0) == [1.0, 1.0]
    path = str(tmp_path / "first")
    assert of("by_expression", 2.0, ts.estimator.WarmStartSettings(path, ".*")) == [1.0, 2.0]
    assert of("by_list", 2.0, ts.estimator.WarmStartSettings(path, [".*"])) == [1.0, 1.0]


def test_names_may_have_changed(tmp_path, first):
    names = {"top.weight": "head.weight", "top.bias": "head.bias"}
    settings = ts.estimator.WarmStartSettings(first.model_dir, var_name_to_prev_var_name=names)
    second = estimator_of(tmp_path / "second", settings, second="top").train(input_fn)
    assert torch.equal(value(second, "top.weight"), value(first, "head.weight"))


@pytest.mark.parametrize("strategy", [None, CPUS])
def test_rows_of_words_find_their_new_places(tmp_path, first, strategy):
    (tmp_path / "old.txt").write_text("cat\ndog\nfox\n")
    (tmp_path / "new.txt").write_text("fox\nowl\ncat\n")
    info = ts.estimator.VocabInfo(str(tmp_path / "new.txt"), 3, 1, str(tmp_path / "old.txt"), old_vocab_size=2)
    settings = ts.estimator.WarmStartSettings(first.model_dir, var_name_to_vocab_info={"words.weight": info})
    strategy = strategy and ts.MirroredStrategy(strategy)
    second = estimator_of(tmp_path / "second", settings, strategy, num_words=4).train(input_fn)
    old, new = value(first, "words.weight"), value(second, "words.weight")
    assert torch.equal(new[2], old[0])
    assert new[:2].tolist() == [[0.0, 0.0]] * 2  # fox is beyond the old vocabulary's size, and owl new
    assert new[3].abs().sum() > 0  # a row for unknown words keeps its initial value


@pytest.mark.parametrize(
    ("arguments", "net", "message"),
    [
        ({}, {"second": "top"}, "Tensor 'top.weight' is not found in"),
        ({}, {"num_words": 5}, r"Shape of variable words.weight \(\(5, 2\)\) doesn't match"),
        ({"var_name_to_prev_var_name": {"nothing": "head.bias"}}, {}, r"does not have: \['nothing'\]"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, first, arguments, net, message):
    settings = ts.estimator.WarmStartSettings(first.model_dir, **arguments)
    with pytest.raises(ValueError, match=message):
        estimator_of(tmp_path / "second", settings, **net).train(input_fn)


@pytest.mark.parametrize(
    ("num_words", "axis", "previous", "message"),
    [
        ((4, 3), 0, "words.weight", "uses 4 words of .*new.txt, but axis 0 of the variable has 3"),
        ((3, 4), 0, "words.weight", "uses 4 words of .*old.txt, but axis 0 of the variable has 3"),
        ((2, 2), 1, "head.weight", r"Shape of variable words.weight \(\(3, 2\)\) doesn't match .* \(\(1, 2\)\)"),
    ],
)
def test_vocabularies_that_do_not_fit_are_named(tmp_path, first, num_words, axis, previous, message):
    for name in ("new", "old"):
        (tmp_path / f"{name}.txt").write_text("a\nb\nc\nd\n")
    new, old = num_words
    info = ts.estimator.VocabInfo(str(tmp_path / "new.txt"), new, 0, str(tmp_path / "old.txt"), old, axis=axis)
    names = {"words.weight": previous}
    settings = ts.estimator.WarmStartSettings(first.model_dir, ".*", {"words.weight": info}, names)
    with pytest.raises(ValueError, match=message):
        estimator_of(tmp_path / "second", settings).train(input_fn)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint"):
        estimator_of(tmp_path / "second", str(tmp_path)).train(input_fn)
    with pytest.raises(ValueError, match="`ckpt_to_initialize_from` MUST be set"):
        ts.estimator.WarmStartSettings("")
