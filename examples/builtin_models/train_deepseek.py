"""Train the built-in DeepSeek-V3-architecture target and its multi-token-prediction module together.

Two phases, each for a given number of seconds: main model and module jointly on the mix of `train_target.py prepare`,
then the module alone on the target's own greedy answers to training questions.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import gsm8k_text
import mix
import torch
from evaluate_target import LIMIT
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from train_target import LONG_EVERY, Recipe, batches, build_model, save
from transformers import AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from drafters.mtp.checkpoint import deepseek_tensors
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpSpec, mtp_target
from drafters.unroll import shift_left, unroll
from evals.data import arithmetic

DECAY = 0.8  # weight of each further step of the module
BALANCE = 1e-3  # step of the routing biases


@dataclass(frozen=True)
class Pair:
    """The target and its module, on one device."""

    model: Any
    head: MtpHead
    pad: int

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.model.parameters(), *self.head.parameters()]


def dense_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All experts on all tokens [T, H]: cheap for a few small ones, and no shape depends on the routing.

    Counts the tokens of every expert in `experts.load`. index, weights: [T, experts a token].
    """
    share = torch.zeros(len(hidden), len(experts.load), dtype=weights.dtype, device=hidden.device)
    share = share.scatter(1, index, weights)  # [T, E]
    experts.load.add_((share.detach() > 0).sum(0))
    pairs = F.linear(hidden, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (share.shape[1], -1))
    gate, up = pairs.chunk(2, dim=-1)  # [T, E, Im]
    inner = experts.act_fn(gate) * up * share[..., None].to(gate.dtype)
    return F.linear(inner.flatten(1), experts.down_proj.transpose(0, 1).flatten(1))


def build(architecture: Path, pad: int, end: int, device: str, seed: int) -> Pair:
    """A fresh target and module; the module shares the target's embedding and lm_head."""
    torch.manual_seed(seed)
    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)
    model: Any = build_model(architecture, pad, end)
    model.to(device)
    model.config._experts_implementation = "dense"
    head = MtpHead(MtpSpec(), mtp_target(model)).to(device)
    for name, parameter in head.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.02)
        elif "norm" in name:
            torch.nn.init.ones_(parameter)
    for mixture in _mixtures(model, head):
        load = torch.zeros(mixture.gate.weight.shape[0], device=device)
        mixture.experts.register_buffer("load", load, persistent=False)
    return Pair(model, head, pad)


def _mixtures(*roots: torch.nn.Module) -> Iterator[Any]:
    return (m for root in roots for m in root.modules() if hasattr(m, "experts") and hasattr(m, "gate"))


def balance(pair: Pair) -> None:
    """Move the routing biases towards experts that got fewer tokens. Source: DeepSeek-V3, section 2.1.2."""
    for mixture in _mixtures(pair.model, pair.head):
        load = mixture.experts.load
        mixture.gate.e_score_correction_bias.add_(BALANCE * torch.sign(load.mean() - load))
        load.zero_()


def states_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The target's states after the final norm [B, S, H]."""
    return model.model(ids, use_cache=False).last_hidden_state


def joint_loss(pair: Pair, states: torch.Tensor, ids: torch.Tensor, steps: int, weight: float) -> torch.Tensor:
    """Next-token loss of the target plus `weight` times the module's, over its own outputs `steps` deep."""
    logits = pair.model.lm_head(states).flatten(0, 1).float()
    loss = F.cross_entropy(logits, _labels(ids, 1, pair.pad), ignore_index=pair.pad)
    for step, x in enumerate(unroll(pair.head, ids, states, steps)):
        labels = _labels(ids, step + 2, pair.pad)
        own = F.cross_entropy(pair.head.logits(x).float(), labels, ignore_index=pair.pad)
        loss = loss + weight * DECAY**step * own
    return loss


def _labels(ids: torch.Tensor, by: int, pad: int) -> torch.Tensor:
    """Token ids [B, S] from `by` further on, padding where a row ends; [B·S]."""
    shifted = shift_left(ids + 1, by)  # 0 where the row has ended
    return torch.where(shifted > 0, shifted - 1, pad).flatten()


def module_loss(pair: Pair, ids: torch.Tensor, answer: torch.Tensor, steps: int) -> torch.Tensor:
    """Soft cross-entropy of the module to the target's distribution over answers; answer: [B, S] bool."""
    with torch.no_grad():
        states = states_of(pair.model, ids)
        wanted = pair.model.lm_head(states).float().softmax(-1)  # [B, S, V]
    loss = states.new_zeros(())
    for step, x in enumerate(unroll(pair.head, ids, states, steps)):
        scores = pair.head.logits(x).float().log_softmax(-1).view_as(wanted)
        rows = -(shift_left(wanted, step + 1) * scores).sum(-1)
        mask = shift_left(answer, step + 2)
        loss = loss + DECAY**step * (rows * mask).sum() / mask.sum().clamp(min=1)
    return loss


def descend(
    parameters: list[torch.nn.Parameter], recipe: Recipe, seconds: float, step_loss: Callable[[], torch.Tensor]
) -> None:
    """AdamW for so many seconds; warm-up and cosine follow the clock."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=fused)
    for _ in range(LONG_EVERY):  # compiles both row lengths; not on the clock
        step_loss().backward()
    optimizer.zero_grad(set_to_none=True)
    started, step, progress = time.perf_counter(), 0, 0.0
    while progress < 1:
        rate = min(1.0, progress / 0.02 + 0.01) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        loss = step_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            click.echo(f"step {step} loss {loss.item():.3f} seconds {time.perf_counter() - started:.0f}")
        step, progress = step + 1, (time.perf_counter() - started) / seconds


def train_jointly(pair: Pair, data: Path, recipe: Recipe, seconds: float, steps: int, compiled: bool) -> None:
    """Phase 1."""
    device = pair.model.device.type
    rows = batches(data, recipe)
    states = torch.compile(states_of, dynamic=False) if compiled else states_of

    def step_loss() -> torch.Tensor:
        ids = next(rows).to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return joint_loss(pair, states(pair.model, ids), ids, steps, weight=0.3)

    def balanced() -> torch.Tensor:
        balance(pair)
        return step_loss()

    descend(pair.parameters(), recipe, seconds, balanced)


def own_answers(
    pair: Pair, tokenizer: Any, generated: int, gsm8k: int, batch: int
) -> list[tuple[list[int], list[int]]]:
    """The target's greedy answers to training questions, as (prompt, answer) token ids; unfinished ones left out."""
    questions = [p.question for p in arithmetic.problems("train", generated, seed=77)]
    questions += [p.question for p in gsm8k_text.split_dev(gsm8k_text.read("train"))[0][:gsm8k]]
    prompts = [mix.chat_text(tokenizer, mix.turn(q, "")[:1], add_generation_prompt=True) for q in questions]
    found = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        for prompt, answer in zip(part, _greedy(pair.model, tokenizer, part), strict=True):
            if answer[-1] == tokenizer.eos_token_id:
                found.append((tokenizer.encode(prompt, add_special_tokens=False), answer))
    return found


@torch.inference_mode()
def _greedy(model: Any, tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Greedy answers, end token included, at most LIMIT tokens."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    ids, attention_mask = (inputs[n].to(model.device) for n in ("input_ids", "attention_mask"))
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.device.type == "cuda"):
        out = model.generate(ids, attention_mask=attention_mask, max_new_tokens=LIMIT, do_sample=False)
    end = tokenizer.eos_token_id
    rows = out[:, ids.shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def train_module(
    pair: Pair, answers: list[tuple[list[int], list[int]]], recipe: Recipe, seconds: float, steps: int
) -> None:
    """Phase 2."""
    device = pair.model.device.type
    pair.model.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(recipe.seed)
    width = min(mix.SHORT, max(len(p) + len(a) for p, a in answers))
    fitting = [(p, a) for p, a in answers if len(p) + len(a) <= width]
    rows = max(1, recipe.tokens_per_step // width)

    def step_loss() -> torch.Tensor:
        ids = torch.full((rows, width), pair.pad)
        answer = torch.zeros(rows, width, dtype=torch.bool)
        for row, place in enumerate(torch.randint(len(fitting), (rows,), generator=generator).tolist()):
            before, after = fitting[place]
            ids[row, : len(before) + len(after)] = torch.tensor(before + after)
            answer[row, len(before) : len(before) + len(after)] = True
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return module_loss(pair, ids.to(device), answer.to(device), steps)

    descend(list(pair.head.parameters()), recipe, seconds, step_loss)


def save_pair(pair: Pair, tokenizer_folder: Path, out: Path) -> None:
    """The target as `from_pretrained` reads it, and the module's tensors beside it in the same file, bf16."""
    layer = pair.model.config.num_hidden_layers
    module = {name: t.to("cpu", torch.bfloat16) for name, t in deepseek_tensors(pair.head, layer).items()}
    save(pair.model, tokenizer_folder, out)
    file = out / "model.safetensors"
    save_file(load_file(file) | module, file, metadata={"format": "pt"})


FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--architecture", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--tokenizer", "tokenizer_folder", type=FOLDER, required=True)
@click.option("--data", type=FOLDER, required=True)
@click.option("--out", type=FOLDER, required=True)
@click.option("--joint-seconds", default=220.0)
@click.option("--module-seconds", default=60.0)
@click.option("--generated-questions", default=8_000, help="Generated problems for phase 2.")
@click.option("--gsm8k-questions", default=8_000, help="Questions of GSM8K's training part for phase 2, at most.")
@click.option("--tokens-per-step", default=32_768)
@click.option("--gsm8k-share", default=0.08)
@click.option("--learning-rate", default=3e-3)
@click.option("--weight-decay", default=0.1)
@click.option("--batch", default=4_096, help="Questions answered at once.")
@click.option("--seed", default=1)
@click.option("--compile/--no-compile", "compiled", default=torch.cuda.is_available())
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(
    architecture: Path,
    tokenizer_folder: Path,
    data: Path,
    out: Path,
    joint_seconds: float,
    module_seconds: float,
    generated_questions: int,
    gsm8k_questions: int,
    batch: int,
    compiled: bool,
    device: str,
    **settings: Any,
) -> None:
    """Train both phases and save."""
    recipe = Recipe(steps=0, **settings)
    words = AutoTokenizer.from_pretrained(tokenizer_folder)
    pair = build(architecture, words.pad_token_id, words.eos_token_id, device, recipe.seed)
    click.echo(json.dumps({"parameters": sum(p.numel() for p in pair.parameters()), "recipe": str(recipe)}))
    train_jointly(pair, data, recipe, joint_seconds, 2, compiled)
    save_pair(pair, tokenizer_folder, out / "joint")
    pair.model.float().to(device)  # from here on the stored bf16 values
    pair.head.target_embedding.copy_(pair.model.get_input_embeddings().weight.detach())
    pair.head.target_lm_head.copy_(pair.model.lm_head.weight.detach())
    answers = own_answers(pair, mix.load_tokenizer(tokenizer_folder), generated_questions, gsm8k_questions, batch)
    click.echo(f"{len(answers)} answers")
    if not answers:
        raise click.ClickException("the target finished no answer; train it longer (--joint-seconds)")
    train_module(pair, answers, recipe, module_seconds, 4)
    save_pair(pair, tokenizer_folder, out / "final")


if __name__ == "__main__":
    main()
