"""Every drafter, round by round in a full engine: its drafts are those of the oracle that has no cache.

Over page crossings, ragged batches, prompts in chunks and preemption; and the comparison sees one broken cache slot.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import eagle3_head, engine_of, free_everywhere, random_prompts, table_head, tiny_llama, wrap

from drafters.base import FINAL_NORM
from drafters.mtp.checkpoint import load_mtp
from drafters.mtp.spec import mtp_target
from drafters.oracle import ChooseDraft, most_probable, oracle_drafts
from specdec.errors import HeadLoadError
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
GREEDY = SamplingParams(max_new_tokens=20, return_drafts=True)
DRAFTERS = ("eagle3", "table", "deepseek_v3", "glm4_moe", "mimo")
SHORT_OF_PAGES = {"kv_cache_tokens": 88, "max_num_seqs": 6}
Pair = tuple[Any, Any]


@pytest.fixture
def make(tiny_case: Callable[..., Any], tmp_path: Path) -> Callable[[str], Pair]:
    """(target, head) by name; the heads are right often enough that accepted and rejected drafts both occur."""

    def built(name: str) -> Pair:
        if name in ("eagle3", "table"):
            model = tiny_llama()
            return model, eagle3_head(model) if name == "eagle3" else table_head(model, aux_layers=(1, 2, 3))
        case = nearly_bigram(tiny_case(name, context=0.02))
        (head,) = load_mtp(case.write(tmp_path), mtp_target(case.model), torch.float32, "cpu")
        return case.model, head

    return built


def nearly_bigram(case: Any) -> Any:
    """Let the module pass the token's embedding on, so that it often says what the (nearly bigram) target says."""
    for name, tensor in case.tensors.items():
        if name.endswith(("eh_proj.weight", "input_proj.weight")):
            halves = [torch.eye(32), 0.2 * torch.randn(32, 32, generator=torch.Generator().manual_seed(3))]
            tensor.copy_(torch.cat(halves[::-1] if "input_proj" in name else halves, dim=1))
    return case


def oracle_rounds(
    model: Any, head: Any, prompt: list[int], completion: Any, choose: ChooseDraft = most_probable
) -> list[tuple[list[int], list[int]]]:
    """(drafts of the engine, drafts of the oracle) of every round."""
    ids = torch.tensor(prompt + completion.token_ids)
    states = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    aux_hidden_states = torch.cat([states[-1 if t == FINAL_NORM else t][0] for t in head.aux_layers], dim=-1)
    rounds, bonus = [], len(prompt)
    for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        if len(drafts):
            before = ids[: bonus + 1], aux_hidden_states[:bonus]
            rounds.append((list(drafts), oracle_drafts(head, *before, len(drafts), choose)))
        bonus += stats.emitted
    return rounds


def greedy_by_hand(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle3", SHORT_OF_PAGES),
        *(pytest.param(name, SHORT_OF_PAGES, marks=pytest.mark.slow) for name in DRAFTERS[1:]),
        pytest.param("eagle3", {}, marks=pytest.mark.long),
        pytest.param("mimo", {"max_num_batched_tokens": 12}, marks=pytest.mark.slow),
        *(pytest.param(n, {"max_num_batched_tokens": 12}, marks=pytest.mark.long) for n in ("eagle3", "deepseek_v3")),
    ],
)
@torch.inference_mode()
@pytest.mark.cases(1)
def test_drafts_equal_the_oracles(name: str, options: dict[str, int], make: Callable[[str], Pair]) -> None:
    model, head = make(name)
    wrapped = wrap(model, head, num_speculative_tokens=3, **options)
    completions = wrapped.generate(PROMPTS, GREEDY)
    rounds = [r for p, c in zip(PROMPTS, completions, strict=True) for r in oracle_rounds(model, head, p, c)]
    assert len(rounds) > 60
    assert [engine for engine, _ in rounds] == [oracle for _, oracle in rounds]
    assert (wrapped.engine_stats.preemptions > 0) == ("kv_cache_tokens" in options)
    assert free_everywhere(wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.long), "mimo"])
@torch.inference_mode()
@pytest.mark.cases(1)
def test_tokens_are_the_targets_greedy_ones(name: str, make: Callable[[str], Pair]) -> None:
    model, head = make(name)
    completions = wrap(model, head, num_speculative_tokens=3).generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [greedy_by_hand(model, p, 20) for p in PROMPTS]
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= 2, "the head must be right and wrong often enough to test something"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", pytest.param("deepseek_v3", marks=pytest.mark.long)])
@torch.inference_mode()
def test_one_zeroed_slot_of_the_heads_cache_is_seen(
    name: str, make: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted defect: after every round the first slot of page 1 of the head's cache is zeroed."""
    model, head = make(name)
    with torch.no_grad():
        for name_, parameter in head.named_parameters():
            if "o_proj" in name_:
                parameter.mul_(50)  # attention decides
    wrapped = wrap(model, head, num_speculative_tokens=3, max_num_seqs=1)
    engine = engine_of(wrapped)
    step = engine.step

    def broken() -> Any:
        updates = step()
        wrapped.runners[1].layers[0].keys[1, 0] = 0
        return updates

    monkeypatch.setattr(engine, "step", broken)
    (completion,) = wrapped.generate([PROMPTS[1]], GREEDY)
    assert any(ours != oracle for ours, oracle in oracle_rounds(model, head, PROMPTS[1], completion))


@pytest.mark.slow
@torch.inference_mode()
def test_draft_mtp_means_the_targets_own_module(tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    case = nearly_bigram(tiny_case("deepseek_v3", context=0.02))
    folder = case.write(tmp_path)
    case.model.name_or_path = str(folder)
    wrapped = wrap(case.model, "mtp", num_speculative_tokens=3)
    assert type(wrapped.head).__name__ == "MtpHead"
    assert wrapped.generate([PROMPTS[0]], GREEDY)[0].token_ids == greedy_by_hand(case.model, PROMPTS[0], 20)
    by_folder = wrap(case.model, str(folder), num_speculative_tokens=1)
    assert by_folder.head.attention_specs == wrapped.head.attention_specs


def test_draft_mtp_without_a_checkpoint_is_refused(tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    case = tiny_case("deepseek_v3")
    case.model.name_or_path = ""
    with pytest.raises(HeadLoadError, match="no name"):
        wrap(case.model, "mtp")
    case.model.name_or_path = str(case.write(tmp_path, dict.fromkeys(case.tensors)))
    with pytest.raises(HeadLoadError, match="no multi-token-prediction module"):
        wrap(case.model, "mtp")
