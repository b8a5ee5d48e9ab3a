"""Several multi-token-prediction modules in rounds from CUDA graphs on a GPU: tokens and drafts of eager rounds, in
rounds of one shape and of any, and no synchronisation but the round's read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fakes import count_calls
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.auto import AutoModelForCausalLM

from attention.batch.host import HostBatch
from benchmarks.shapes import SHAPES
from drafters.loops.fixed_forms import FixedModules
from drafters.mtp.head import MtpHead, MtpStack
from drafters.mtp.spec import MtpSpec, mtp_target
from specdec import Completion
from specdec.execution.base import DraftedVerification
from specdec.execution.ragged import RaggedPrefill
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.agreement import agreement, drafted

CUDA = torch.device("cuda")
VOCAB, HIDDEN = 512, 256
LENGTHS = (5, 33, 1, 17, 300, 64)
PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
GREEDY = SamplingParams(max_new_tokens=48, return_drafts=True)
MIXED = [
    SamplingParams(max_new_tokens=48, temperature=0.7 * (i % 2), top_p=0.9, seed=i, return_drafts=True)
    for i in range(len(PROMPTS))
]


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def llama() -> LlamaConfig:
    return LlamaConfig(
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


def latent_mixture() -> PreTrainedConfig:
    """MLA and routed experts, with the widths that FlashInfer's MLA kernels take."""
    config = SHAPES["tiny-deepseek"]()
    config.vocab_size = VOCAB
    return config


def model(
    modules: int,
    drafts: int,
    graphs: bool,
    config: PreTrainedConfig | None = None,
    backend: str = "flashinfer",
    **options: Any,
) -> SpeculativeModel:
    """Modules that pass the token embedding on, as the small target nearly does: now and then they are right.

    Prompts come in chunks of at most 48 tokens, beside verifications.
    """
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config or llama(), dtype=torch.float32).eval().requires_grad_(False)
    target.get_input_embeddings().weight.mul_(50)
    target.get_output_embeddings().weight.mul_(20)  # clear winners: rounding of half precision decides few tokens
    target = target.to(CUDA, torch.float16)
    heads = [MtpHead(MtpSpec(), mtp_target(target)).eval().requires_grad_(False) for _ in range(modules)]
    for head in heads:
        for parameter in head.parameters():
            if parameter.dim() > 2:  # stacked experts are made empty
                torch.nn.init.normal_(parameter, std=0.02)
        small = 0.1 * torch.randn(HIDDEN, HIDDEN)
        head.eh_proj.weight.copy_(torch.cat([torch.eye(HIDDEN), small / HIDDEN**0.5], 1))
        head.to(CUDA, torch.float16)
    return SpeculativeModel.from_pretrained(
        target,
        MtpStack(heads),
        num_speculative_tokens=drafts,
        backend=backend,
        tokenizer=Tokenizer(),
        max_num_batched_tokens=48,
        max_model_len=512,
        cuda_graphs=graphs,
        **{"max_num_seqs": 4, **options},
    )


def reads_beside(host: HostBatch, query_len: int) -> bool:
    """Whether a batch reads prompt tokens in one row, more than a verification has, and verifies in another."""
    lens = np.diff(host.query_start_loc)
    going_on = (lens <= query_len) & (host.num_computed_tokens > 0)
    return bool((lens > query_len).any() and going_on.any())


def check(ours: list[Completion], others: list[Completion], least: float) -> None:
    assert max(r.accepted for c in ours for r in c.stats.rounds) >= 1
    assert agreement([c.token_ids for c in ours], [c.token_ids for c in others]) >= least
    assert agreement(drafted(ours), drafted(others)) >= least


@pytest.mark.parametrize(("modules", "drafts"), [(2, 1), (2, 2), (2, 3), (2, 5), (3, 5)])
def test_graphs_give_the_eager_tokens_and_drafts(modules: int, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = model(modules, drafts, False).generate(PROMPTS, GREEDY)
    captured = count_calls(monkeypatch, FixedModules, "prefill")
    graphed = model(modules, drafts, True)
    assert bool(captured) == (drafts > 1)  # of one draft it is the chain of the first module
    drafting = count_calls(monkeypatch, type(graphed.engine.executor), "_draft_on")
    ragged = count_calls(monkeypatch, RaggedPrefill, "run")
    completions = graphed.generate(PROMPTS, GREEDY)
    assert len(ragged) > 6 and len(drafting) > len(ragged) + 10
    check(completions, eager, 0.97)


def test_one_row_at_a_time() -> None:
    """The graphs have two rows at least; one of them is nobody's."""
    eager = model(2, 3, False, max_num_seqs=1).generate(PROMPTS, GREEDY)
    check(model(2, 3, True, max_num_seqs=1).generate(PROMPTS, GREEDY), eager, 0.97)


@pytest.mark.parametrize(("modules", "drafts"), [(2, 3), (3, 5)])
def test_sampled_rows_among_greedy_ones(modules: int, drafts: int) -> None:
    """Same seeds: the uniforms are the same, so rounding alone tells them apart."""
    eager = model(modules, drafts, False).generate(PROMPTS, MIXED)
    check(model(modules, drafts, True).generate(PROMPTS, MIXED), eager, 0.9)


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_a_latent_mixture(params: Any) -> None:
    """Experts run in another form outside of graphs, and a router turns rounding into another expert."""
    eager = model(2, 3, False, latent_mixture()).generate(PROMPTS, params)
    check(model(2, 3, True, latent_mixture()).generate(PROMPTS, params), eager, 0.8)


def test_neighbours_change_no_token_where_matmuls_and_attention_are_batch_invariant() -> None:
    """Greedy tokens with two modules are, bit for bit, those of every request alone."""
    graphed = model(2, 3, True, backend="batch_invariant")
    together = graphed.generate(PROMPTS, GREEDY)
    alone = [graphed.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert max(r.accepted for c in together for r in c.stats.rounds) >= 1


def strict_launches(executor: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on what launches a round raises where it synchronises; what it returns, as it comes."""
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
    return found


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_launching_a_round_never_synchronises(params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside verifications, and verifications alone; what has to be captured was before.

    Without prefix caching the second answers take the rounds of the first ones; with it prompts would hardly be read.
    """
    wrapped = model(2, 3, True, enable_prefix_caching=False)
    wrapped.generate(PROMPTS, params)
    found = strict_launches(wrapped.engine.executor, monkeypatch)
    ragged = count_calls(monkeypatch, RaggedPrefill, "run")
    wrapped.generate(PROMPTS, params)
    assert sum(isinstance(each, DraftedVerification) for each in found) >= len(ragged) + 10
    assert sum(reads_beside(ahead.passes[0].host, 4) for _, ahead in ragged) >= 4
