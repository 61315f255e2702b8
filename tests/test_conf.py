"""Every file under conf/ composes, every strategy that hydra can choose is made, and commands in comments are right."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from torchstrategy.base.options import CommunicationOptions, PowerSGD

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
STRATEGIES = sorted(path.stem for path in (ROOT / "torchstrategy" / "conf" / "strategy").glob("*.yaml"))
CONFIGS = sorted(str(path.relative_to(CONF).with_suffix("")) for path in [*CONF.glob("*.yaml"), *CONF.glob("*/*.yaml")])
CHOICES = sorted(f"{path.parent.name}/{path.stem}" for path in CONF.glob("benchmarks/*/*.yaml"))
HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None


def settings(config, *options):
    folder, _, name = f"{CONF}/{config}".rpartition("/")
    with initialize_config_dir(folder, version_base="1.3"):
        return compose(name, list(options))


def test_all_files_are_found():
    assert len(list(CONF.rglob("*.yaml"))) == len(CONFIGS) + len(CHOICES) == 29
    assert len(STRATEGIES) == 7


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_composes_and_begins_with_its_command(config):
    text = (CONF / f"{config}.yaml").read_text()
    assert text.startswith(f"# python recipes/{config}.py\n"), "each begins with the command that runs it"
    assert (ROOT / "recipes" / f"{config}.py").exists()
    assert not OmegaConf.missing_keys(settings(config))


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_the_commands_at_the_head_of_a_configuration_compose(config):
    head = re.match(r"(?:# .*\n)+", (CONF / f"{config}.yaml").read_text())[0]
    for command in re.findall(rf"recipes/{config}\.py(.*)", head):
        options = [word for word in shlex.split(command, comments=True) if word != "-m"]
        settings(config, *(option for option in options if "," not in option or "[" in option))


def test_no_command_finds_what_another_one_has_saved():
    """These recipes go on where a folder's last run has ended."""
    folders = []
    for config in (
        "estimator",
        "fault_tolerant",
        "finetune_transformer",
        "image_classification",
        "parameter_server",
        "ray_train",
        "sharded_files",
    ):
        head = re.match(r"(?:# .*\n)+", (CONF / f"{config}.yaml").read_text())[0]
        for command in re.findall(rf"recipes/{config}\.py(.*)", head):
            options = OmegaConf.from_dotlist(
                [o for o in shlex.split(command, comments=True) if o.startswith("folder=")]
            )
            folders.append(OmegaConf.merge(OmegaConf.load(CONF / f"{config}.yaml"), options).folder)
    assert len(folders) == len(set(folders)) > 12


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_the_benchmarks_is_made(choice, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "benchmarks"))
    group, _, name = choice.partition("/")
    config = settings("benchmarks/network", f"{group}={name}")[group]
    assert instantiate(config, _convert_="all") is not None


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "tpu"])
def test_a_strategy_is_made(name):
    assert instantiate(settings("custom_loop", f"strategy={name}").strategy, _convert_="all").num_replicas_in_sync == 1


@pytest.mark.parametrize("strategy", ["central_storage", "mirrored", "multi_worker_mirrored"])
def test_gradients_can_be_compressed_from_the_command_line(strategy):
    name = "strategy.communication_options.gradient_compression"
    power_sgd = "{_target_:torchstrategy.experimental.PowerSGD,rank:2,start_after:10}"
    for value, expected in (("null", None), ("bf16", "bf16"), (power_sgd, PowerSGD(rank=2, start_after=10))):
        config = settings("custom_loop", f"strategy={strategy}", f"{name}={value}")
        options = instantiate(config.strategy.communication_options, _convert_="all")
        assert options == CommunicationOptions(gradient_compression=expected)


@pytest.mark.skipif(HAS_TORCH_XLA, reason="torch_xla is installed")
def test_without_torch_xla_the_extra_is_named():
    config = settings("custom_loop", "strategy=tpu").strategy
    with pytest.raises(InstantiationException, match=r"torch-xla\[tpu\]") as caught:
        instantiate(config, _convert_="all")
    assert isinstance(caught.value.__cause__, ImportError)
