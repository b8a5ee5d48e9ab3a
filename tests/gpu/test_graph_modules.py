"""Several multi-token-prediction modules in rounds from CUDA graphs on a GPU: the eager road's tokens and drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import count_calls
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.loops.modules.static import StaticModules
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpSpec, mtp_target
from drafters.mtp.stack import MtpStack
from specdec import Completion
from specdec.execution.verification import DraftedVerification
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

CUDA = torch.device("cuda")
VOCAB, HIDDEN = 512, 256
LENGTHS = (5, 33, 1, 17, 300, 64)
PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def model(modules: int, drafts: int, graphs: bool) -> SpeculativeModel:
    """Modules that pass the token embedding on, as the small target nearly does: now and then they are right."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    target.model.embed_tokens.weight.mul_(50)
    target.lm_head.weight.mul_(20)  # clear winners: rounding of half precision decides few tokens
    target = target.to(CUDA, torch.float16)
    heads = [MtpHead(MtpSpec(), mtp_target(target)).eval().requires_grad_(False) for _ in range(modules)]
    for head in heads:
        small = 0.1 * torch.randn(HIDDEN, HIDDEN)
        head.eh_proj.weight.copy_(torch.cat([torch.eye(HIDDEN), small / HIDDEN**0.5], 1))
        head.to(CUDA, torch.float16)
    return SpeculativeModel.from_pretrained(
        target,
        MtpStack(heads),
        num_speculative_tokens=drafts,
        backend="flashinfer",
        tokenizer=Tokenizer(),
        max_num_seqs=4,
        max_model_len=512,
        cuda_graphs=graphs,
    )


def agreement(ours: list[Any], others: list[Any]) -> float:
    """Share of positions with equal ids, up to each sequence's first difference and one beyond."""
    same = total = 0
    for a, b in zip(ours, others, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        same += len(a) if first is None else first
        total += len(a) if first is None else first + 1
    return same / total


def drafted(completions: list[Completion]) -> list[list[int]]:
    """All draft ids of each completion, one round behind the other."""
    return [[t for round_ in c.drafts or () for t in round_] for c in completions]


@pytest.mark.parametrize(("modules", "drafts"), [(2, 2), (2, 3), (2, 5), (3, 5)])
def test_graphs_give_the_eager_tokens_and_drafts(modules: int, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=48, return_drafts=True)
    eager = model(modules, drafts, False).generate(PROMPTS, params)
    captured = count_calls(monkeypatch, StaticModules, "prefill")
    graphed = model(modules, drafts, True)
    assert captured
    drafting = count_calls(monkeypatch, type(graphed.executor), "_draft_on")
    completions = graphed.generate(PROMPTS, params)
    assert len(drafting) > 20
    assert max(r.accepted for c in completions for r in c.stats.rounds) >= 1
    assert agreement([c.token_ids for c in completions], [c.token_ids for c in eager]) >= 0.97
    assert agreement(drafted(completions), drafted(eager)) >= 0.97


def test_launching_a_round_never_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = model(2, 3, True)
    updates = wrapped.stream([PROMPTS[1]], SamplingParams(max_new_tokens=100))
    for _ in range(4):
        next(updates)
    executor: Any = wrapped.executor
    found: list[Any] = []

    def strict(plain: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                found.append(plain(*args))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return found[-1]

        return watched

    for name in ("send", "verify", "_draft_on"):
        monkeypatch.setattr(executor, name, strict(getattr(executor, name)))
    for _ in range(6):
        next(updates)
    assert sum(isinstance(each, DraftedVerification) for each in found) >= 4
