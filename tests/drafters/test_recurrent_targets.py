"""Heads on targets with recurrent layers: the tokens are the target's, the drafts those of a head without cache.

True states come from transformers' own forward, so a state that was rolled back wrongly shows in the drafts as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, eagle3_head, free_everywhere, random_prompts, wrap

from drafters.base import FINAL_NORM
from drafters.oracle import oracle_drafts
from specdec import SamplingParams, SpeculativeModel
from tests.hybrids import tiny_hybrid

PROMPTS = random_prompts((5, 33, 1, 17))
GREEDY = SamplingParams(max_new_tokens=16, return_drafts=True)
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h")


def true_states(model: Any, ids: torch.Tensor, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V], and states [T, A·H] at these boundaries, of transformers' own forward.

    By hooks: Mamba's `output_hidden_states` is one layer off from that of other models.
    """
    seen: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Any:
        return lambda module, args, kwargs: seen.update({layer: (args[0] if args else kwargs["hidden_states"])[0]})

    decoder = model.get_decoder()
    hooks = [decoder.layers[t].register_forward_pre_hook(note(t), with_kwargs=True) for t in layers if t != FINAL_NORM]
    logits = model(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    if FINAL_NORM in layers:
        seen[FINAL_NORM] = decoder(ids[None], use_cache=False).last_hidden_state[0]
    return logits, torch.cat([seen[t] for t in layers], dim=-1)


def checked_rounds(model: Any, head: Any, prompt: list[int], completion: Any) -> int:
    """How many rounds had drafts; each must be the oracle's. The tokens must be the target's most probable ones."""
    ids = torch.tensor(prompt + completion.token_ids)
    logits, states = true_states(model, ids, head.aux_layers)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids
    drafted, bonus = 0, len(prompt)
    for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        if len(drafts):
            drafted += 1
            assert list(drafts) == oracle_drafts(head, ids[: bonus + 1], states[:bonus], len(drafts))
        bonus += stats.emitted
    return drafted


def through_engine(wrapped: Any) -> list[Any]:
    """The completions, after their rounds were compared with the oracle's."""
    completions = wrapped.generate(PROMPTS, GREEDY)
    pairs = zip(PROMPTS, completions, strict=True)
    assert sum(checked_rounds(wrapped.hf_model, wrapped.head, p, c) for p, c in pairs) > 15
    assert free_everywhere(wrapped)
    return completions  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n == "qwen3_5_moe")) for n in FAMILIES])
@torch.inference_mode()
@pytest.mark.cases(1)
def test_a_checkpoints_own_module_drafts(name: str, drafts: int, tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    case = tiny_case(name, context=0.02)
    for tensor_name, tensor in case.tensors.items():
        if tensor_name.endswith(("fc.weight", "eh_proj.weight")):  # often what the nearly bigram target says
            noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
            tensor.copy_(torch.cat([torch.eye(32), 0.2 * noise], dim=1))
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "page_size": 4, "kv_cache_tokens": 120}
    wrapped = SpeculativeModel.from_pretrained(
        case.write(tmp_path), "mtp", tokenizer=LetterTokenizer(), num_speculative_tokens=drafts, **sizes
    )
    assert wrapped.describe()["recurrent"] is not None
    accepted = [r.accepted for c in through_engine(wrapped) for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= min(drafts, 2), "the head must be right and wrong to test something"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(n, marks=pytest.mark.long) for n in ("nemotron_h", "lfm2")), "mamba2"]
)
@torch.inference_mode()
@pytest.mark.cases(1)
def test_an_eagle3_head_reads_true_states(name: str) -> None:
    model = tiny_hybrid(name)
    through_engine(wrap(model, eagle3_head(model), num_speculative_tokens=3, max_model_len=128))
