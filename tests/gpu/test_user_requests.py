"""Log-probabilities, and processors and criteria of the user's, over CUDA graphs: the same bits drafted or not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.gpu.test_logits_options import QUESTIONS

NEW = 120
HALF = len(QUESTIONS)


class Paced(LogitsProcessor):
    """Bans every fifth token, other ones at each call."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 5, scores.shape[1], 5, device=scores.device), -1e9)


class AtRepeat(StoppingCriteria):
    """Stops where the last token was generated before among the last 30."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -31:-1] == input_ids[:, -1:]).any(1) & (input_ids.shape[1] > 60)


ASKS: dict[str, dict[str, Any]] = {
    "raw": {"logprobs": 5},
    "processed": {"logprobs": 3, "logprobs_mode": "processed", "repetition_penalty": 1.2},
    "processor": {"logits_processor": Paced(), "logprobs": 1},
    "criterion": {"stopping_criteria": AtRepeat()},
}


@cache
def answers(backend: str, drafts: int, name: str) -> list[Any]:
    """Of requests that ask for something, then of others beside them."""
    with SpeculativeModel.from_pretrained(
        "gsm-llama", "auto", num_speculative_tokens=3, max_num_seqs=16, dtype=torch.float16, backend=backend
    ) as model:
        params = [SamplingParams(NEW, num_speculative_tokens=drafts, **own) for own in (ASKS[name], {})]
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return model.generate([*chats, *chats], [params[0]] * HALF + [params[1]] * HALF)


@pytest.mark.parametrize("name", ASKS)
def test_drafts_change_no_bit(name: str) -> None:
    drafted, plain = answers("batch_invariant", 3, name), answers("batch_invariant", 0, name)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert [c.logprobs for c in drafted] == [c.logprobs for c in plain]
    assert [c.finish_reason for c in drafted] == [c.finish_reason for c in plain]
    assert any(r.accepted for c in drafted[:HALF] for r in c.stats.rounds)
    if name == "criterion":
        assert any(c.finish_reason == "stop" for c in drafted[:HALF])
    if name == "processor":
        assert [c.token_ids for c in drafted[:HALF]] != [c.token_ids for c in drafted[HALF:]]


def test_of_a_hundred_requests_drafts_change_no_bit() -> None:
    """Five drafts and none, in batches of 32: tokens, their log-probabilities, and those of four others."""
    chats = [[{"role": "user", "content": f"{QUESTIONS[i % 8]} And {i} more?"}] for i in range(100)]
    params = [SamplingParams(NEW, **ASKS["processed" if i % 2 else "raw"]) for i in range(100)]
    options: dict[str, Any] = {"max_num_seqs": 32, "dtype": torch.float16, "backend": "batch_invariant"}
    found = []
    for drafts in (5, 0):
        draft = "auto" if drafts else None
        with SpeculativeModel.from_pretrained("gsm-llama", draft, num_speculative_tokens=drafts, **options) as model:
            found.append(model.generate(chats, params))
    drafted, plain = found
    assert sum(r.accepted for c in drafted for r in c.stats.rounds) > 1_000
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert [c.logprobs for c in drafted] == [c.logprobs for c in plain]
    print(f"{sum(len(c.token_ids) for c in drafted)} tokens")


@pytest.mark.parametrize("drafts", [0, 3])
@torch.no_grad()
def test_raw_ones_are_close_to_a_plain_forward(drafts: int) -> None:
    """Half precision: within what two forwards over other shapes differ by."""
    from transformers import AutoModelForCausalLM

    from specdec.loading.names import builtin_path

    plain = AutoModelForCausalLM.from_pretrained(builtin_path("gsm-llama"), dtype=torch.float16).cuda().eval()
    found = []
    for completion in answers("flashinfer", drafts, "raw")[:HALF]:
        ids = torch.tensor([completion.prompt_token_ids + completion.token_ids], device="cuda")
        logits = plain(ids).logits[0, len(completion.prompt_token_ids) - 1 : -1].float().log_softmax(1)
        right = logits.gather(1, ids[0, len(completion.prompt_token_ids) :, None])[:, 0].cpu()
        given = torch.tensor([each.logprob for each in completion.logprobs])
        found.append((given - right).abs())
    differences = torch.cat(found)
    print(f"{len(differences)} tokens, largest difference {differences.max():.4f}, mean {differences.mean():.5f}")
    assert differences.max() < 0.1 and differences.mean() < 0.005
