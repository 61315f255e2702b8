"""The recipe that trains models of transformers, all of them and by LoRA, with one replica and with two."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.recipes import layouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: make test-engines"),
]
SHORT = ["max_characters=8000", "global_batch_size=10", "save_every=4", "epochs=1"]
TWO = ["strategy=mirrored", "strategy.devices=[cpu:0,cpu:1]"]
PROCESSES = ["-m", "torch.distributed.run", "--nproc-per-node=2"]


def train(folder, *options, launcher=()):
    """Run a copy of the recipe and return the lines that it prints."""
    folder.mkdir(exist_ok=True)
    shutil.copy(layouts.RECIPES / "finetune_transformer.py", folder)
    shutil.copy(layouts.ROOT / "conf" / "finetune_transformer.yaml", folder)
    process = warm.run([sys.executable, *launcher, folder / "finetune_transformer.py", *SHORT, *options], folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return (process.stdout + process.stderr).splitlines()


def losses(lines):
    return [float(number) for line in lines if line.startswith("Epoch") for number in re.findall(r": (\d+\.\d+)", line)]


@pytest.mark.parametrize(
    "options", [[], ["lora={r: 4}"], ["model=bert", "masked=true"]], ids=["all", "LoRA", "encoder"]
)
def test_two_replicas_train_like_one(tmp_path, options):
    expected = losses(train(tmp_path / "one", "strategy=default", *options))
    assert len(expected) == 2
    assert losses(train(tmp_path / "two", *TWO, *options)) == pytest.approx(expected, abs=2e-4)
    if not options:
        assert losses(train(tmp_path / "processes", launcher=PROCESSES)) == pytest.approx(expected, abs=2e-4)


def test_a_second_start_goes_on_and_the_model_can_be_trained_further(tmp_path):
    straight = losses(train(tmp_path / "straight", "epochs=2"))
    first = losses(train(tmp_path / "stopped"))
    lines = train(tmp_path / "stopped", "epochs=2")
    assert any(line.startswith("Going on in epoch 2 after step ") for line in lines)
    assert first + losses(lines) == pytest.approx(straight, abs=2e-4)

    tokenizers, transformers = (pytest.importorskip(name) for name in ("tokenizers", "transformers"))
    saved = tmp_path / "stopped" / "outputs" / "finetune_transformer" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(b"The ")])).logits
    assert logits.shape == (1, 4, 257)
    assert losses(train(tmp_path / "of_bytes", f"checkpoint={saved}"))[0] < straight[-2]  # it brings no tokenizer
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<u>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=257, special_tokens=["<u>"], show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<u>").save_pretrained(saved)
    assert losses(train(tmp_path / "further", f"checkpoint={saved}", "lora={r: 4}", f"text={__file__}"))
