"""Every file under conf/ composes, and every choice of a group can be made into the object it names."""

import importlib.util
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from torchstrategy.base.options import CommunicationOptions, PowerSGD

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
RECIPES = sorted(path.stem for path in CONF.glob("*.yaml"))
CHOICES = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.rglob("*/*.yaml"))
NEEDS_DOWNLOAD = {"data/mnist"}
NEEDS_PACKAGE = {"data/fashion_mnist": Path("/usr/share/datasets/fashion-mnist")}
NEEDS_SUBMITIT = {"launcher/submitit_slurm"}
NEEDS_TORCH_XLA = {"strategy/tpu"}
HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None
HAS_SUBMITIT = importlib.util.find_spec("submitit") is not None
ARGUMENTS = {"learning_rate": {"global_batch_size": 10}}
RECIPE_WITH = {"partitioner": "parameter_server"}  # the others are choices of the custom loop


@pytest.fixture(autouse=True)
def _recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def test_all_files_are_found():
    assert len(list(CONF.rglob("*.yaml"))) == len(RECIPES) + len(CHOICES) == 46
    assert len(NEEDS_DOWNLOAD | set(NEEDS_PACKAGE) | NEEDS_SUBMITIT | NEEDS_TORCH_XLA) == 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_configuration(recipe):
    text = (CONF / f"{recipe}.yaml").read_text()
    assert text.startswith(f"# python recipes/{recipe}.py\n"), "each begins with the command that runs it"
    config = compose(recipe)
    assert not OmegaConf.missing_keys(config)
    assert (ROOT / "recipes" / f"{recipe}.py").exists()


@pytest.mark.parametrize("choice", CHOICES)
def test_choice(choice):
    group, _, name = choice.partition("/")
    if choice in NEEDS_SUBMITIT and not HAS_SUBMITIT:
        pytest.skip("needs hydra-submitit-launcher")
    config = compose(RECIPE_WITH.get(group, "custom_loop"), [f"{group}={name}"])[group]
    if choice in NEEDS_DOWNLOAD or not NEEDS_PACKAGE.get(choice, ROOT).exists():
        pytest.skip("its files are not on this machine")
    if choice in NEEDS_TORCH_XLA:
        pytest.skip("makes its strategy in a process of its own: tests/tpu/test_recipes.py")
    assert instantiate(config, _convert_="all", **ARGUMENTS.get(group, {})) is not None


@pytest.mark.parametrize("strategy", ["central_storage", "mirrored", "multi_worker_mirrored"])
def test_gradients_can_be_compressed_from_the_command_line(strategy):
    name = "strategy.communication_options.gradient_compression"
    power_sgd = "{_target_:torchstrategy.experimental.PowerSGD,rank:2,start_after:10}"
    for value, expected in (("null", None), ("bf16", "bf16"), (power_sgd, PowerSGD(rank=2, start_after=10))):
        config = compose("custom_loop", [f"strategy={strategy}", f"{name}={value}"])
        options = instantiate(config.strategy.communication_options, _convert_="all")
        assert options == CommunicationOptions(gradient_compression=expected)


@pytest.mark.skipif(HAS_TORCH_XLA, reason="torch_xla is installed")
def test_without_torch_xla_the_extra_is_named():
    config = compose("custom_loop", ["strategy=tpu"]).strategy
    with pytest.raises(InstantiationException, match=r"torchstrategy\[tpu\]") as caught:
        instantiate(config, _convert_="all")
    assert isinstance(caught.value.__cause__, ImportError)


def test_without_the_plugin_the_submitit_launcher_is_named():
    if HAS_SUBMITIT:
        pytest.skip("hydra-submitit-launcher is installed")
    with pytest.raises(MissingConfigException, match="Could not find 'hydra/launcher/submitit_slurm'"):
        compose("custom_loop", ["launcher=submitit_slurm"])


@pytest.mark.skipif(not HAS_SUBMITIT, reason="needs hydra-submitit-launcher")
def test_jobs_of_slurm_start_their_processes():
    config = compose("custom_loop", ["launcher=submitit_slurm", "launcher.nproc=4"], return_hydra_config=True)
    assert config.launcher == {"nproc": 4, "max_restarts": 0}
    assert config.hydra.launcher._target_.endswith(".SlurmLauncher")
    assert (config.hydra.launcher.nodes, config.hydra.launcher.tasks_per_node) == (1, 1)
