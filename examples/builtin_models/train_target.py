"""Train a built-in target: `tokenizer`, `prepare`, `train`, `evaluate`. Run from the repository root; see README.md."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import gsm8k_text
import mix
import numpy as np
import torch
from evaluate_target import evaluate
from gsm8k_text import Pair
from make_tokenizer import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from evals.data import arithmetic

LONG_EVERY = 6  # every sixth step takes long rows


@dataclass(frozen=True)
class Recipe:
    """What one training run is made of."""

    steps: int
    tokens_per_step: int
    gsm8k_share: float
    learning_rate: float
    weight_decay: float
    seed: int

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up over 2 %, then a cosine down to 2 %."""
        warm = max(1, self.steps // 50)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


def build_model(architecture: Path, pad: int, end: int) -> PreTrainedModel:
    """A fresh model of the architecture in a config JSON, float32."""
    settings = json.loads(architecture.read_text(encoding="utf-8"))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, pad_token_id=pad, eos_token_id=end)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor, pad: int) -> torch.Tensor:
    """Mean cross-entropy of every token but padding. ids: int64 [B, T]."""
    logits = model(ids[:, :-1], use_cache=False).logits  # [B, T-1, V]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=pad)


def batches(folder: Path, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Endless batches int64 [B, length], short and long rows in a fixed pattern, both sources mixed in each."""
    rng = np.random.default_rng(recipe.seed)
    streams = {
        length: {source: _endless(np.load(folder / f"{source}-{length}.npy"), rng) for source in mix.SOURCES}
        for length in (mix.SHORT, mix.LONG)
    }
    step = 0
    while True:
        length = mix.LONG if step % LONG_EVERY == LONG_EVERY - 1 else mix.SHORT
        rows = max(1, recipe.tokens_per_step // length)
        names = np.where(rng.random(rows) < recipe.gsm8k_share, "gsm8k", "generated")
        yield torch.from_numpy(np.stack([next(streams[length][name]) for name in names]).astype(np.int64))
        step += 1


def _endless(rows: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    while True:
        for index in rng.permutation(len(rows)):
            yield rows[index]


def fit(model: PreTrainedModel, folder: Path, recipe: Recipe, device: str) -> PreTrainedModel:
    """Train in place (bf16 autocast on a GPU, compiled there) and return the model."""
    torch.manual_seed(recipe.seed)
    torch.nn.Module.to(model, device)
    model.train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=device == "cuda")
    loss_of = torch.compile(next_token_loss, dynamic=False) if device == "cuda" else next_token_loss
    started = time.perf_counter()
    for step, ids in zip(range(recipe.steps), batches(folder, recipe), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model, ids.to(device, non_blocking=True), model.config.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == recipe.steps - 1:
            click.echo(f"step {step} loss {loss.item():.3f} seconds {time.perf_counter() - started:.0f}")
    return model.eval()


def save(model: PreTrainedModel, tokenizer_folder: Path, out: Path) -> None:
    """Weights in bf16, tokenizer and generation config, as `from_pretrained` reads them."""
    torch.nn.Module.to(model, "cpu", torch.bfloat16)
    model.save_pretrained(out)
    shutil.copytree(tokenizer_folder, out, dirs_exist_ok=True)
    config = model.config
    GenerationConfig(eos_token_id=[config.eos_token_id], pad_token_id=config.pad_token_id).save_pretrained(out)


def question_sets(names: tuple[str, ...], most: int) -> dict[str, list[Pair]]:
    """The named question sets, each cut to `most`: dev (a part of GSM8K train), heldout (generated), test (GSM8K)."""
    readers = {
        "dev": lambda: gsm8k_text.split_dev(gsm8k_text.read("train"))[1],
        "heldout": lambda: [Pair(p.question, p.answer) for p in arithmetic.problems("heldout", 1000, seed=1)],
        "test": lambda: gsm8k_text.read("test"),
    }
    return {name: readers[name]()[:most] for name in names}


SETS = ("dev", "heldout", "test")
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group()
def main() -> None:
    """Train and measure a built-in target model."""


@main.command()
@click.option("--out", type=FOLDER, required=True)
@click.option("--generated", default=30_000, help="Generated problems to train on, beside GSM8K's training split.")
def tokenizer(out: Path, generated: int) -> None:
    """Train the tokenizer."""
    found = [Pair(p.question, p.answer) for p in arithmetic.problems("train", generated, seed=0)]
    found += gsm8k_text.split_dev(gsm8k_text.read("train"))[0]
    make_tokenizer(mix.blocks([pair]) for pair in found).save_pretrained(out)


@main.command()
@click.option("--tokenizer", "tokenizer_folder", type=FOLDER, required=True)
@click.option("--out", type=FOLDER, required=True)
@click.option("--generated", default=1_000_000, help="Generated problems.")
@click.option("--passes", default=8, help="Differently varied passes over GSM8K's training part.")
@click.option("--workers", default=os.cpu_count() or 1)
@click.option("--seed", default=1)
def prepare(tokenizer_folder: Path, out: Path, generated: int, passes: int, workers: int, seed: int) -> None:
    """Write the tokenized training mix."""
    click.echo(json.dumps(mix.build(out, str(tokenizer_folder), generated, passes, workers, seed)))


@main.command()
@click.option("--architecture", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--tokenizer", "tokenizer_folder", type=FOLDER, required=True)
@click.option("--data", type=FOLDER, required=True)
@click.option("--out", type=FOLDER, required=True)
@click.option("--steps", default=9_000)
@click.option("--tokens-per-step", default=32_768)
@click.option("--gsm8k-share", default=0.1, help="Share of rows from GSM8K's training part.")
@click.option("--learning-rate", default=3e-3)
@click.option("--weight-decay", default=0.1)
@click.option("--seed", default=1)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def train(
    architecture: Path,
    tokenizer_folder: Path,
    data: Path,
    out: Path,
    device: str,
    steps: int,
    tokens_per_step: int,
    gsm8k_share: float,
    learning_rate: float,
    weight_decay: float,
    seed: int,
) -> None:
    """Train a model and save it."""
    recipe = Recipe(steps, tokens_per_step, gsm8k_share, learning_rate, weight_decay, seed)
    torch.manual_seed(recipe.seed)
    words = mix.load_tokenizer(tokenizer_folder)
    model = build_model(architecture, words.pad_token_id, words.eos_token_id)
    click.echo(f"{model.num_parameters():,} parameters; {recipe}")
    save(fit(model, data, recipe, device), tokenizer_folder, out)


@main.command(name="evaluate")
@click.argument("models", nargs=-1, type=FOLDER, required=True)
@click.option("--set", "names", multiple=True, type=click.Choice(SETS), default=("dev", "heldout"))
@click.option("--most", default=1_319, help="Questions of each set at most.")
@click.option("--batch", default=256)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def evaluate_command(models: tuple[Path, ...], names: tuple[str, ...], most: int, batch: int, device: str) -> None:
    """Print one JSON line a model."""
    sets = question_sets(names, most)
    for folder in models:
        click.echo(json.dumps({"model": folder.name, **evaluate(folder, sets, batch, device)}))


if __name__ == "__main__":
    main()
