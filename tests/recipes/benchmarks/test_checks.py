"""Wrong options are refused before a benchmark starts anything, and the message says what was expected."""

import importlib
import inspect
import math

import checks
import network
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from slow_network import Link

from tests.recipes import layouts

OPTIONS = {"n": 3, "cluster": {"ps": 0}, "sizes": [2, 1], "seconds": 0.5, "quick": True, "models": ["mlp"]}
RECIPES = sorted(path.stem for path in (layouts.ROOT / "conf" / "benchmarks").glob("*.yaml"))


def settings(recipe, *options):
    with initialize_config_dir(str(layouts.ROOT / "conf" / "benchmarks"), version_base="1.3"):
        return compose(recipe, list(options))


def run(recipe, *options):
    """Call what hydra would call."""
    main = inspect.unwrap(importlib.import_module(recipe).main)
    return main(settings(recipe, *options))


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_right_options_pass(make):
    options = make(OPTIONS | {"nothing": None, "profile": False, "profile_steps": {"skip": 1, "record": 1}})
    checks.integers(options, "n", least=3, most=3)
    checks.integers(options, "cluster.ps", least=0)
    checks.integers(options, "nothing", "n", may_be_null=True)
    checks.lists_of_integers(options, "sizes")
    checks.positive_numbers(options, "seconds", "n")
    checks.flags(options, "quick")
    checks.choices(options, "models", ["conv_net", "mlp"])
    checks.choice(options, "n", [2, 3])
    checks.profile(options)


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
@pytest.mark.parametrize(
    ("check", "name", "values", "message"),
    [
        (checks.integers, "n", [0, -1, 1.0, "1", True, None, [1]], "n must be an integer of at least 1. Received: "),
        (checks.positive_numbers, "n", [0, -0.1, math.nan, math.inf, "1", True, None], "n must be a number above 0."),
        (checks.flags, "n", [0, "no", None], "n must be true or false. Received: "),
        (
            checks.lists_of_integers,
            "n",
            [[], [1, 0], 1, "12", [1.5], [None], None],
            "n must be a list of integers of at least 1. Received: ",
        ),
    ],
)
def test_wrong_options(make, check, name, values, message):
    for value in values:
        with pytest.raises(ValueError, match="^" + message):
            check(make({name: value}), name)


def test_wrong_spans_and_choices():
    with pytest.raises(ValueError, match=r"^cluster\.ps must be null or an integer of at least 1\. Received: 0"):
        checks.integers(OPTIONS, "cluster.ps", may_be_null=True)
    with pytest.raises(ValueError, match=r"^n must be an integer from 1 to 2\. Received: 3"):
        checks.integers(OPTIONS, "n", most=2)
    with pytest.raises(ValueError, match=r"^models must be of \['conv_net'\]\. Received: \['mlp'\]"):
        checks.choices(OPTIONS, "models", ["conv_net"])
    with pytest.raises(ValueError, match=r"^models must be a list, such as 'models=\[mlp\]'\. Received: 'mlp'"):
        checks.choices({"models": "mlp"}, "models", ["mlp"])
    with pytest.raises(ValueError, match=r"^models must be a list, such as 'models=\[conv_net\]'\. Received: \[\]"):
        checks.choices({"models": []}, "models", ["conv_net"])
    with pytest.raises(ValueError, match=r"^n must be one of \[1, 2\]\. Received: 3"):
        checks.choice(OPTIONS, "n", [1, 2])


@pytest.mark.slow
def test_every_benchmark_has_a_profile():
    for recipe in RECIPES:
        config = settings(recipe)
        assert config.profile is False
        checks.profile(config)


PROFILES = {
    "profile=yes": r"profile must be true or false\. Received: 'yes'",
    "profile_steps=3": r"profile_steps must be of the form \{skip: 5, record: 10\}\. Received: 3",
    "+profile_steps.wait=1": r"profile_steps must be of the form .* Received: \{.*'wait': 1\}",
    "profile_steps.skip=0": r"profile_steps\.skip must be an integer of at least 1\. Received: 0",
    "profile_steps.record=all": r"profile_steps\.record must be an integer of at least 1\. Received: 'all'",
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_wrong_profiles(recipe):
    for option, message in PROFILES.items():
        with pytest.raises(ValueError, match="^" + message):
            run(recipe, option)


INTEGERS = {
    "training": ["replicas", "threads", "batch_size", "starts", "pairs", "fewest_steps", "run.calls", "run.steps"],
    "central_storage": ["width", "layers", "steps"],
    "checkpoints": ["pairs"],
    "model_fit": ["starts", "pairs", "examples", "batch_size", "threads"],
    "input": ["num_examples", "num_files", "pairs", "memory_epochs", "overlap_repeats"],
    "network": ["hosts", "threads", "batch_size", "rounds", "steps", "compute_steps", "fitted_links"],
    "servers": ["rounds", "ps", "work.floats", "work.closures", "work.train_steps"],
    "scale": ["parameters", "steps", "per_host"],
    "optimizer_memory": ["width", "layers", "batch_size", "steps", "rounds"],
    "estimator_steps": ["batch_size", "skip", "steps", "rounds"],
    "tpu_steps": ["starts", "pairs", "steps", "batch_size"],
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_wrong_numbers(recipe):
    for name in INTEGERS[recipe]:
        for value in ("0", "-1", "1.5", "many"):
            with pytest.raises(ValueError, match=rf"^{name} must be (null or )?an integer (of at least|from) \d"):
                run(recipe, f"{name}={value}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("training", ["block_s=0"], "block_s must be a number above 0"),
        ("training", ["scaling.replicas=[0]"], r"scaling\.replicas must be a list of integers of at least 1"),
        ("training", ["scaling.model=resnet"], r"scaling\.model must be one of .*Received: 'resnet'"),
        (
            "training",
            ["collectives.processes=[1]"],
            r"collectives\.processes must be a list of integers of at least 2",
        ),
        ("training", ["parts=[]"], "parts must be a list, such as"),
        ("training", ["~settings.default"], "settings must have `default`, .*Received: default: None"),
        ("training", ["+settings.mine={channels_last: true}"], "each of them .*'optimizer'.* Received: mine: "),
        ("central_storage", ["processes=[0]"], "processes must be a list of integers of at least 1"),
        ("scale", ["ranks=[1]"], "ranks must be a list of integers of at least 2"),
        ("scale", ["network.gbit_s=0"], r"network\.gbit_s must be a number above 0"),
        ("optimizer_memory", ["processes=[1]"], "processes must be a list of integers of at least 2"),
        ("optimizer_memory", ["implementation=NCCL"], r"implementation must be one of \['RING', 'AUTO'\]"),
        ("model_fit", ["models=[resnet]"], r"models must be of \['conv_net', 'mlp'\]\. Received: \['resnet'\]"),
        ("model_fit", ["layouts=[3 processes]"], r"layouts must be of .*Received: \['3 processes'\]"),
        ("model_fit", ["quick=no"], "quick must be true or false"),
        ("input", ["num_workers=[-1]"], "num_workers must be a list of integers of at least 0"),
        ("input", ["batch_sizes=64"], "batch_sizes must be a list of integers of at least 1"),
        ("network", ["ways=[mine]"], r"ways must be of .*'ours, bf16'.* Received: \['mine'\]"),
        ("network", ["ways=ours"], r"ways must be a list, such as 'ways=\[ours\]'"),
        ("network", ["ways=[DDP]", "profile=true"], r"add one to ways, of \['ours', 'ours, no overlap', "),
        ("network", ["fitted_links=5"], "fitted_links must be from 2 to the number of links, 4"),
        ("network", ["hosts=255"], "hosts must be an integer from 2 to 254"),
        ("servers", ["work.table=[1000]"], r"work\.table must be \[rows, columns\]"),
        ("servers", ["workers=[]"], "workers must be a list of integers"),
        ("tpu_steps", ["models=[mlp]"], "models must be of"),
        ("tpu_steps", ["devices=[0]"], "devices must be a list of integers of at least 1"),
        ("tpu_steps", ["profile=true", "steps=14"], "steps must be at least .*15. Received: 14"),
    ],
)
def test_other_wrong_options(recipe, options, message):
    with pytest.raises(ValueError, match=message):
        run(recipe, *options)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([], r"links must be a list such as \[\{mbit: 200, delay_ms: 5\}\]\. Received: \[\]"),
        ({"mbit": 200, "delay_ms": 5}, r"links must be a list such as .*Received: \{'mbit'"),
        (["fast"], r"links must be a list such as .*Received: \['fast'\]"),
        ([{"mbit": 200}], r"Each of links has mbit and delay_ms, no more and no less\. Received: \{'mbit': 200\}"),
        ([{"mbit": 200, "delay_ms": 5, "loss": 0.1}], "Each of links has mbit and delay_ms"),
        ([{"mbit": 200, "delay": 5}], "Each of links has mbit and delay_ms"),
        ([{"mbit": "fast", "delay_ms": 5}], r"positive number of mbit .*Received: Link\(mbit='fast', delay_ms=5\)"),
        ([{"mbit": 0, "delay_ms": 5}], "positive number of mbit"),
        ([{"mbit": 200, "delay_ms": -1}], "a delay_ms from 0"),
        ([{"mbit": math.inf, "delay_ms": 1}], "positive number of mbit"),
        ([{"mbit": 200, "delay_ms": None}], "a delay_ms from 0"),
        ([{"mbit": 200, "delay_ms": 5}, {"mbit": 200.0, "delay_ms": 5}], "links must differ from one another"),
    ],
)
def test_wrong_links(links, message):
    with pytest.raises(ValueError, match=message):
        network.make_links(links)


def test_links():
    given = [{"mbit": 200, "delay_ms": 5}, {"mbit": 0.5, "delay_ms": 0}]
    assert network.make_links(given) == [Link(200, 5), Link(0.5, 0)]


def test_one_link_is_enough_without_a_model():
    config = OmegaConf.to_container(settings("network", "links=[{mbit: 200, delay_ms: 5}]", "ways=[DDP]"))
    links, ways = network.check(config)
    assert links == [Link(200, 5)]
    assert ways == ["one replica alone", "DDP"]
