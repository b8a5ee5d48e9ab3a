"""Measure a trained target: greedy answers (well-formed, right, length) and the perplexity of reference answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from gsm8k_text import Pair
from mix import chat_text, load_tokenizer, turn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

LIMIT = 320
_LAST_LINE = re.compile(r"(?:^|\n)#### (-?[\d.]+)$")


@dataclass(frozen=True)
class Quality:
    """Shares and means over one question set; `confidence` is the mean log-probability of the greedy tokens."""

    questions: int
    well_formed: float
    right: float
    mean_tokens: float
    confidence: float
    perplexity: float


def evaluate(folder: Path, sets: dict[str, list[Pair]], batch: int, device: str) -> dict[str, dict[str, float]]:
    """Quality of the model in `folder`, as stored (bf16 values, float32 arithmetic), on each named question set."""
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.nn.Module.to(model, device)
    return {name: asdict(_quality(model, tokenizer, pairs, batch)) for name, pairs in sets.items()}


def last_number(text: str) -> str | None:
    """The number of the last line `#### number`, or None when the text does not end with one.

    >>> last_number("6+6 = 12.\\n#### 12"), last_number("#### 12 apples")
    ('12', None)
    """
    match = _LAST_LINE.search(text)
    return match.group(1) if match else None


def _quality(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], batch: int) -> Quality:
    answers: list[list[int]] = []
    confidence = loss = tokens = 0.0
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        prompts = [chat_text(tokenizer, turn(p.question, "")[:1], add_generation_prompt=True) for p in part]
        generated = _greedy(model, tokenizer, prompts)
        answers += generated
        confidence -= _nll(model, tokenizer, prompts, generated)[0]
        reference = [tokenizer.encode(p.answer + tokenizer.eos_token, add_special_tokens=False) for p in part]
        nll, count = _nll(model, tokenizer, prompts, reference)
        loss, tokens = loss + nll, tokens + count
    ended = [ids[-1] == tokenizer.eos_token_id for ids in answers]
    numbers = [last_number(str(tokenizer.decode(ids, skip_special_tokens=True))) for ids in answers]
    right = [e and n == last_number(p.answer) for e, n, p in zip(ended, numbers, pairs, strict=True)]
    return Quality(
        questions=len(pairs),
        well_formed=sum(e and n is not None for e, n in zip(ended, numbers, strict=True)) / len(pairs),
        right=sum(right) / len(pairs),
        mean_tokens=sum(map(len, answers)) / len(pairs),
        confidence=confidence / sum(map(len, answers)),
        perplexity=math.exp(loss / tokens),
    )


@torch.inference_mode()
def _greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[list[int]]:
    """Greedy answers, end token included, at most LIMIT tokens."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    generate = cast(Callable[..., torch.Tensor], model.generate)
    out = generate(**inputs, max_new_tokens=LIMIT, do_sample=False)  # [B, T], prompts included
    answers = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [_until(ids, tokenizer.eos_token_id) for ids in answers]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


@torch.inference_mode()
def _nll(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], answers: list[list[int]]
) -> tuple[float, int]:
    """Summed negative log-likelihood of the answers after their prompts, and the number of their tokens."""
    heads = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    width = max(len(h) + len(a) for h, a in zip(heads, answers, strict=True))
    ids = torch.full((len(heads), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (head, answer) in enumerate(zip(heads, answers, strict=True)):
        ids[row, : len(head) + len(answer)] = torch.tensor(head + answer)
        labels[row, len(head) : len(head) + len(answer)] = torch.tensor(answer)
    logits = model(ids.to(model.device)).logits[:, :-1]  # [B, T-1, V]; padding stands on the right, so needs no mask
    targets = labels[:, 1:].to(model.device)
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total.item(), int((targets != -100).sum())
