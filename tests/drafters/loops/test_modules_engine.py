"""Several modules in a full engine: tokens are the target's own, drafts those of modules that recompute everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import engine_of, free_everywhere, random_prompts, wrap

from drafters.loops.base import DraftInput
from drafters.mtp.head import MtpStack
from drafters.oracle import ChooseDraft, most_probable
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.oracles import oracle_module_drafts

PROMPTS = random_prompts((5, 33, 1, 17, 60, 2))
NEW = 14
GREEDY = SamplingParams(max_new_tokens=NEW, return_drafts=True)
SHORT_OF_PAGES = {"kv_cache_tokens": 88, "max_num_seqs": 6, "max_num_batched_tokens": 36}
SHORT_CHUNKS = {"max_num_batched_tokens": 12, "max_num_seqs": 2}


@pytest.fixture
def make(tiny_case: Callable[..., Any], tmp_path: Path) -> Callable[..., SpeculativeModel]:
    """A model whose modules pass the token's embedding on, so that they are right every now and then."""

    def built(name: str, modules: int, **options: Any) -> SpeculativeModel:
        case = tiny_case(name, modules=modules, context=0.02)
        for tensor_name, tensor in case.tensors.items():
            if tensor_name.endswith(("eh_proj.weight", "input_proj.weight")):
                halves = [torch.eye(32), 0.1 * torch.randn(32, 32, generator=torch.Generator().manual_seed(3))]
                tensor.copy_(torch.cat(halves[::-1] if "input_proj" in tensor_name else halves, dim=1))
        folder = case.write(tmp_path / f"{name}-{modules}")
        return wrap(case.model, str(folder), **options)

    return built


def greedy_by_hand(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


def rounds(
    wrapped: SpeculativeModel, prompt: list[int], completion: Any, choose: ChooseDraft = most_probable
) -> list[tuple[list[int], list[int]]]:
    """(drafts of the engine, drafts of the oracle) of every round."""
    ids = torch.tensor(prompt + completion.token_ids)
    states = wrapped.hf_model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
    found, bonus = [], len(prompt)
    for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        if len(drafts):
            before = ids[: bonus + 1], states[:bonus]
            oracle = oracle_module_drafts(wrapped.head, *before, len(drafts), choose)  # type: ignore[arg-type]
            found.append((list(drafts)[: len(oracle)], oracle))
        bonus += stats.emitted
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "drafts", "options"),
    [
        pytest.param("deepseek_v3", 2, 2, SHORT_OF_PAGES, marks=pytest.mark.long),
        pytest.param("deepseek_v3", 2, 5, SHORT_CHUNKS, marks=pytest.mark.long),
        ("deepseek_v3", 3, 4, SHORT_OF_PAGES),
        pytest.param("deepseek_v3", 3, 4, SHORT_CHUNKS, marks=pytest.mark.long),
        ("mimo", 2, 3, SHORT_CHUNKS),
    ],
)
@torch.inference_mode()
@pytest.mark.thorough
def test_tokens_and_drafts(
    name: str, modules: int, drafts: int, options: dict[str, int], make: Callable[..., SpeculativeModel]
) -> None:
    """Over page crossings, ragged batches, prompts in chunks of any length, one-token prompts and preemption."""
    wrapped = make(name, modules, num_speculative_tokens=drafts, **options)
    assert isinstance(wrapped.head, MtpStack) and len(wrapped.runners[1].layers) == modules
    completions = wrapped.generate(PROMPTS, GREEDY, max_new_tokens=20)
    assert [c.token_ids for c in completions] == [greedy_by_hand(wrapped.hf_model, p, 20) for p in PROMPTS]
    compared = [r for p, c in zip(PROMPTS, completions, strict=True) for r in rounds(wrapped, p, c)]
    assert len(compared) > 40
    assert [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= 2, "the modules must be right and wrong often enough to test something"
    assert (wrapped.engine_stats.preemptions > 0) == ("kv_cache_tokens" in options)
    assert wrapped.engine_stats.host_to_device == wrapped.engine_stats.rounds, "verification and loop in one copy"
    assert free_everywhere(wrapped)


SHORT_OF_MODULES = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "max_num_prefill_tokens": 2}
"""Prompts in chunks shorter than the modules are many."""
SHARED = [random_prompts((18,), seed=6)[0] + own for own in (*random_prompts((5, 1, 9, 2, 7), seed=3), [])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "options"),
    [
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(3, {}, marks=pytest.mark.long),
        (3, SHORT_OF_MODULES | {"page_size": 1}),
        pytest.param(3, SHORT_OF_MODULES, marks=pytest.mark.long),
        pytest.param(3, {"page_size": 1}, marks=pytest.mark.long),
    ],
    ids=["two", "three", "both shorter than the modules are many", "chunks shorter", "pages shorter"],
)
@torch.inference_mode()
@pytest.mark.thorough
def test_drafts_on_pages_of_other_requests(
    modules: int, options: dict[str, int], make: Callable[..., SpeculativeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module's rows stand further back than the first position that a request reads: there they are another's.

    Planted: modules begin their rows there all the same.
    """
    wrapped = make("deepseek_v3", modules, num_speculative_tokens=4, **options)
    with torch.no_grad():
        for each in wrapped.head.heads:  # type: ignore[union-attr]
            each.blocks[0].self_attn.o_proj.weight.mul_(50)  # attention decides
    compared = []
    for _ in range(2):
        completions = wrapped.generate(SHARED, GREEDY)
        compared += [r for p, c in zip(SHARED, completions, strict=True) for r in rounds(wrapped, p, c)]
    assert len(compared) > 60 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    assert wrapped.engine_stats.cached_tokens > 100
    if options:
        return
    plain = DraftInput
    monkeypatch.setattr(
        "specdec.rounds.drafting.DraftInput",
        lambda **given: plain(**{**given, "begins": np.zeros_like(given["begins"])}),
    )
    wrapped.refresh()
    completions = wrapped.generate(SHARED, GREEDY)
    compared = [r for p, c in zip(SHARED, completions, strict=True) for r in rounds(wrapped, p, c)]
    assert any(ours != oracle for ours, oracle in compared)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.thorough
def test_a_request_must_not_carry_anothers_vector(
    make: Callable[..., SpeculativeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention decides, drafts are the oracle's; planted: what is carried from round to round is lost."""
    wrapped = make("deepseek_v3", 2, num_speculative_tokens=3)
    loop: Any = wrapped.engine.executor.drafter.loop
    with torch.no_grad():
        for each in wrapped.head.heads:  # type: ignore[union-attr]
            each.blocks[0].self_attn.o_proj.weight.mul_(50)  # attention decides
    completions = wrapped.generate(PROMPTS, GREEDY)
    compared = [r for p, c in zip(PROMPTS, completions, strict=True) for r in rounds(wrapped, p, c)]
    assert len(compared) > 40 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    engine = engine_of(wrapped)
    step = engine.step

    def forgetful() -> Any:
        updates = step()
        for row in range(wrapped.config.max_num_seqs):
            loop.carried_by(row).zero_()
        return updates

    monkeypatch.setattr(engine, "step", forgetful)
    (completion,) = wrapped.generate([PROMPTS[1]], GREEDY)
    assert any(ours != oracle for ours, oracle in rounds(wrapped, PROMPTS[1], completion))


@pytest.mark.slow
@torch.inference_mode()
def test_modules_that_no_draft_comes_from_are_not_run(make: Callable[..., SpeculativeModel]) -> None:
    """Of one draft: only the first of three modules. It drafts as it did."""
    wrapped = make("deepseek_v3", 3, num_speculative_tokens=1)
    calls = [0, 0, 0]
    for m, module in enumerate(wrapped.head.mtp_modules):  # type: ignore[union-attr]
        plain = module.run_block

        def counted(*args: Any, m: int = m, plain: Any = plain) -> Any:
            calls[m] += 1
            return plain(*args)

        module.run_block = counted
    completions = wrapped.generate(PROMPTS[:3], GREEDY)
    assert calls[0] > 0 and calls[1:] == [0, 0]
    for module in wrapped.head.mtp_modules:  # type: ignore[union-attr]
        del module.run_block
    compared = [r for p, c in zip(PROMPTS, completions, strict=False) for r in rounds(wrapped, p, c)]
    assert compared and all(ours == oracle for ours, oracle in compared)


@pytest.mark.slow
@pytest.mark.thorough
def test_sampled_requests_run_and_repeat(make: Callable[..., SpeculativeModel]) -> None:
    wrapped = make("deepseek_v3", 2, num_speculative_tokens=3)
    params = [SamplingParams(max_new_tokens=8, temperature=0.9 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    first, again = ([c.token_ids for c in wrapped.generate(PROMPTS, params)] for _ in range(2))
    assert first == again
    alone = wrapped.generate([PROMPTS[3]], params[3])
    assert alone[0].token_ids == first[3]


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "drafts"), [pytest.param(2, 3, marks=pytest.mark.long), (3, 5)])
@pytest.mark.thorough
def test_neighbours_and_preemption_change_no_round(
    modules: int, drafts: int, make: Callable[..., SpeculativeModel]
) -> None:
    """Also of requests shorter than the modules are many: drafts that have no states to be made from are not made."""
    prompts = random_prompts((1, 33, 1, 2, 30, 3, 17), seed=4)
    params = [SamplingParams(max_new_tokens=14, temperature=0.9, seed=i, return_drafts=True) for i in range(7)]
    wrapped = make("deepseek_v3", modules, num_speculative_tokens=drafts, kv_cache_tokens=72, max_num_batched_tokens=24)
    together = wrapped.generate(prompts, params)
    assert wrapped.engine_stats.preemptions > 0
    alone = [wrapped.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    assert [(c.token_ids, c.drafts, c.stats.rounds) for c in together] == [
        (c.token_ids, c.drafts, c.stats.rounds) for c in alone
    ]
    first = [min(drafts, len(p) + 1) if len(p) < modules else drafts for p in prompts]
    assert [len(c.drafts[0]) for c in alone] == first  # type: ignore[index]
