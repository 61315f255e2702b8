"""Train a transformer of Hugging Face, all of it or by LoRA. Commands: conf/finetune_transformer.yaml."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import hydra  # pip install hydra-core
import peft  # pip install peft
import torch
import transformers  # pip install transformers
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from tqdm import tqdm

import torchstrategy as ts

CONF = "." if Path(__file__).with_name("finetune_transformer.yaml").exists() else "../conf"  # a copy has it beside it


@hydra.main(config_path=CONF, config_name="finetune_transformer", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train on blocks of a text, saving every so many steps; write the model as Hugging Face's programs read it."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    strategy = instantiate(config.strategy, _convert_="all")
    say = tqdm.write if strategy.is_chief else lambda _: None
    blocks, mask = encode(config)
    test, train = (batches_of(part, mask, strategy, config) for part in blocks.tensor_split([len(blocks) // 10]))
    torch.manual_seed(config.seed)
    with strategy.scope():
        model = make_model(config)
        optimizer = instantiate(config.optimizer, _convert_="all")(model.parameters())
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / config.warmup_steps, total_iters=config.warmup_steps)
        mean_loss, test_loss = ts.metrics.Mean(), ts.metrics.Mean()
        epochs, steps = (ts.Variable(0, trainable=False, name=name) for name in ("epochs", "steps"))
    say(f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,} parameters are trained.")

    def per_example_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=config.bf16):
            logits = model(input_ids=inputs).logits
        each = nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        return each.sum(1) / (targets != -100).sum(1).clamp(min=1)

    def train_step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        losses = per_example_loss(inputs, targets)
        ts.nn.compute_average_loss(losses, global_batch_size="actual").backward()
        ts.get_replica_context().sum_gradients(optimizer)  # before the clipping, which needs the summed gradients
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        mean_loss.update_state(losses.detach())

    @torch.no_grad()
    def test_step(inputs: Tensor, targets: Tensor) -> None:
        test_loss.update_state(per_example_loss(inputs, targets))

    values = {"model": model, "optimizer": optimizer, "warmup": warmup, "loss": mean_loss, "dataset": train}
    checkpoint = ts.train.Checkpoint(epochs=epochs, steps=steps, **values)
    every = {"step_counter": steps, "checkpoint_interval": config.save_every}
    manager = ts.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2, **every)
    if manager.restore_or_initialize():
        say(f"Going on in epoch {int(epochs) + 1} after step {int(steps)}.")
    while int(epochs) < config.epochs:
        for batch in tqdm(train, "train", leave=False, disable=not strategy.is_chief or None):
            strategy.run(train_step, args=batch)
            warmup.step()
            steps.assign_add(1)
            manager.save()  # which it does in every `save_every`th step
        for batch in test:
            strategy.run(test_step, args=batch)
        epochs.assign_add(1)
        say(f"Epoch {int(epochs)}, loss: {float(mean_loss.result()):.4f}, test: {float(test_loss.result()):.4f}")
        for metric in (mean_loss, test_loss):
            metric.reset_state()
        manager.save(check_interval=False)

    if strategy.is_chief:
        plain = make_model(config)
        ts.train.Checkpoint(model=plain).restore(manager.latest_checkpoint).expect_partial()
        (plain.merge_and_unload() if config.lora else plain).save_pretrained(folder / "model")
        say(f"transformers reads the model from {folder / 'model'}.")


def batches_of(blocks: Tensor, mask: int | None, strategy: ts.Strategy, config: DictConfig) -> ts.DistributedDataset:
    """Return batches of what the model reads and what it predicts at each place; -100 does not count."""
    examples = blocks[:, :-1], blocks[:, 1:]
    if config.masked:
        hidden = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(config.seed)) < 0.15
        examples = torch.where(hidden, mask, blocks), torch.where(hidden, blocks, -100)
    dataset = ts.data.Dataset.from_tensor_slices(examples).shuffle(len(blocks), seed=config.seed)
    return strategy.experimental_distribute_dataset(dataset.batch(config.global_batch_size))


def make_model(config: DictConfig) -> nn.Module:
    """Return a decoder, or with `masked` an encoder: of a checkpoint, or with random weights."""
    auto = transformers.AutoModelForMaskedLM if config.masked else transformers.AutoModelForCausalLM
    if config.checkpoint:
        model = auto.from_pretrained(config.checkpoint, local_files_only=True)
    else:
        model = auto.from_config(transformers.AutoConfig.for_model(**config.models[config.model]))
    return peft.get_peft_model(model, peft.LoraConfig(**config.lora)) if config.lora else model


def encode(config: DictConfig) -> tuple[Tensor, int | None]:
    """Return a text in blocks of tokens, or of bytes where no checkpoint brings a tokenizer, and what hides a token."""
    text = Path(config.text).read_text("utf-8") if config.text else "\n".join(pydoc_data.topics.topics.values())
    tokens, mask = list(text[: config.max_characters].encode()), 256
    if config.checkpoint and Path(config.checkpoint, "tokenizer_config.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.checkpoint, local_files_only=True)
        tokens, mask = tokenizer(text[: config.max_characters])["input_ids"], tokenizer.mask_token_id
    if len(tokens) < 10 * config.block:
        raise ValueError(f"The text must have ten blocks of {config.block} tokens at least. It has {len(tokens)}.")
    return torch.tensor(tokens[: len(tokens) // config.block * config.block]).view(-1, config.block), mask


if __name__ == "__main__":
    main()
