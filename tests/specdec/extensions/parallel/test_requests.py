"""Requests that ask for more than tokens, with a target that is divided: all of it is as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, LetterTokenizer, eagle3_head, random_prompts
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from drafters.eagle3.export import save_eagle3
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((9, 4, 14, 6, 3, 8, 11))


class Counting:
    """A processor with a state: each call bans a further token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([self.calls % VOCAB]), float("-inf"))


class NotCopied(Counting):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a lock")


def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > len(PROMPTS[6]) + 2:
        raise ValueError("enough")
    return scores


def options() -> list[dict[str, Any]]:
    """Made anew for each model: one of them is called as it is."""
    return [
        {"frequency_penalty": 0.7, "no_repeat_ngram_size": 2, "min_new_tokens": 6, "logprobs": 2},
        {"logits_processor": Counting()},
        {"logits_processor": [NotCopied()], "temperature": 0.8, "seed": 3},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: list(range(1, VOCAB, 2)), "temperature": 1.1, "seed": 4},
        {"stopping_criteria": lambda ids, scores: ids.shape[1] > 10},
        {"prompt_logprobs": 1, "return_scores": True, "temperature": 0.9, "top_k": 5, "seed": 6},
    ]


def asked(model: Any) -> list[Any]:
    params = [SamplingParams(14, ignore_eos=True, return_drafts=True, **own) for own in options()]
    found = model.generate(PROMPTS[:6], params)
    with pytest.raises(Exception, match="its logits processor raised ValueError: enough"):
        model.generate(PROMPTS[6], SamplingParams(14, logits_processor=raising, ignore_eos=True))
    found += model.generate(PROMPTS[:2], params[:2])
    assert model.usage().requests == 0
    assert found[2].stats.not_drafted and found[4].finish_reason == "stop"
    return [(each.token_ids, each.drafts, each.finish_reason, each.stats.rounds) for each in found], [
        [one.logprob for one in found[0].logprobs],
        [one.logprob for one in found[5].prompt_logprobs[1:]],
        found[5].scores.clip(-50).tolist(),
        [score.logprob for score in model.score(PROMPTS[0], PROMPTS[1:4])],
    ]


@pytest.mark.slow
def test_they_get_what_one_process_gives_them(two_ranks: Any, folders: Callable[[str], Path], tmp_path: Path) -> None:
    name = "one-kv-head"
    head = eagle3_head(AutoModelForCausalLM.from_pretrained(folders(name)), aux_layers=(0, 1, 2))
    draft = str(save_eagle3(head, tmp_path / "head"))
    sizes: dict[str, Any] = {"tokenizer": LetterTokenizer(), "num_speculative_tokens": 3, "max_num_seqs": 4}
    sizes |= {"max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400, "device": "cpu"}
    with SpeculativeModel.from_pretrained(folders(name), draft, **sizes) as one:
        right, numbers = asked(one)
    with SpeculativeModel.from_pretrained(folders(name), draft, tensor_parallel_size=2, **sizes) as two:
        found, others = asked(two)
    assert found == right
    for ours, theirs in zip(others, numbers, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.thorough
def test_drafts_by_lookup(two_ranks: Any, folders: Callable[[str], Path]) -> None:
    """Each rank looks them up for itself, in the same tokens."""
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 240}
    given = {"tokenizer": LetterTokenizer(), "num_speculative_tokens": 4, "lookup_min": 1, "device": "cpu", **sizes}
    params = [SamplingParams(20, return_drafts=True, temperature=0.3 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    said = []
    for size in (1, 2):
        path = folders("two-kv-heads")
        with SpeculativeModel.from_pretrained(path, "lookup", tensor_parallel_size=size, **given) as model:
            found = model.generate([prompt * 2 for prompt in PROMPTS], params)
            said.append([(completion.token_ids, completion.drafts) for completion in found])
    assert said[0] == said[1] and any(round_.accepted for completion in found for round_ in completion.stats.rounds)
