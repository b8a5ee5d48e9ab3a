"""Short prompts in virtual rows on a GPU: bit for bit what segments give, where no bit depends on the batch."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import count_calls

import specdec.execution.fixed
from specdec import SamplingParams, SpeculativeModel
from specdec.execution.ragged import RaggedTarget
from specdec.loading.builtin import builtin_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("gsm-deepseek" not in builtin_names(), reason="no built-in targets"),
]
SIZES: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512, "kv_cache_tokens": 8192, "device": "cuda"}
QUESTIONS = [
    f"Question: Anna has {n} apples and buys {n + 3} more. How many does she have?\nAnswer:" for n in range(12)
]


def both(model: SpeculativeModel, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Completions of one prompt after the other, by segments, and in virtual rows."""
    ragged, found = count_calls(monkeypatch, RaggedTarget, "logits"), []
    for most in (-1, specdec.execution.fixed.MOST_KEYS):
        monkeypatch.setattr(specdec.execution.fixed, "MOST_KEYS", most)
        before = len(ragged)
        found.append([model.generate([question], params)[0] for question in QUESTIONS])
        assert len(ragged) - before == (len(QUESTIONS) if most < 0 else 0)
    return found[0], found[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_invariant_tokens_keep_their_bits(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "backend": "batch_invariant", "cuda_graphs": True, **SIZES}
    params = SamplingParams(max_new_tokens=48, temperature=temperature, seed=3, cache_prefix=False)
    with SpeculativeModel.from_pretrained("gsm-llama", "auto", num_speculative_tokens=5, **options) as model:
        by_segments, virtual = both(model, params, monkeypatch)
    assert [c.token_ids[:1] for c in virtual] == [c.token_ids[:1] for c in by_segments]
    if not temperature:  # sampled rounds depend on the drafts, whose bits may differ
        assert [c.token_ids for c in virtual] == [c.token_ids for c in by_segments]


@pytest.mark.parametrize(("target", "draft"), [("gsm-llama", "auto"), ("gsm-deepseek", "mtp")])
def test_flashinfer_reads_what_virtual_rows_wrote(monkeypatch: pytest.MonkeyPatch, target: str, draft: str) -> None:
    """In half precision a near tie may go another way."""
    params = SamplingParams(max_new_tokens=48, cache_prefix=False)
    options: dict[str, Any] = {"dtype": "bfloat16", "cuda_graphs": True, "num_speculative_tokens": 3, **SIZES}
    options |= {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    with SpeculativeModel.from_pretrained(target, draft, **options) as model:
        by_segments, virtual = both(model, params, monkeypatch)
    same = sum(a.token_ids == b.token_ids for a, b in zip(virtual, by_segments, strict=True))
    accepted = [sum(r.accepted for c in found for r in c.stats.rounds) for found in (by_segments, virtual)]
    assert same >= len(QUESTIONS) - 3 and accepted[1] == pytest.approx(accepted[0], rel=0.1)
