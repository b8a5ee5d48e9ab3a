"""Score: log-probabilities of given completions, read as prompts are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specdec.errors import InvalidInputError
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.prompts import Prompts, encode_prompts
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.requests.submission import Submission


@dataclass(frozen=True)
class Score:
    """How probable a completion is after its prompt, by the model's own logits.

    Attributes:
        logprob: log-probability (natural logarithm) of the whole, the sum of its tokens'.
        logprobs: of each token.
    """

    logprob: float
    logprobs: tuple[TokenLogprobs, ...]

    @property
    def token_ids(self) -> list[int]:
        """The completion as the model read it."""
        return [each.token_id for each in self.logprobs]

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have generated it: no other token was more probable at any of its places."""
        return not any(each.rank for each in self.logprobs)


def to_be_scored(
    prompts: Prompts, completions: Prompts, logprobs: int, tokenizer: Any, device: torch.device
) -> list[Submission]:
    """A request for each pair: it reads all tokens but the last, which it is then made to generate.

    Raises:
        InvalidInputError: a bad prompt or completion, an empty one, or not as many of both.
    """
    before, after = encode_prompts(prompts, tokenizer), _encoded(completions, tokenizer)
    if len(before) == 1:
        before *= len(after)
    if len(before) != len(after):
        raise InvalidInputError(f"{len(after)} completions for {len(before)} prompts: give one prompt, or as many")
    return [
        _request(prompt, own, logprobs, i, device) for i, (prompt, own) in enumerate(zip(before, after, strict=True))
    ]


def scores(done: Iterable[tuple[int, Completion]]) -> list[Score]:
    """Of requests of `to_be_scored`, in their order. done: (place, Completion) of each."""
    return [_score(completion) for _, completion in sorted(done, key=lambda each: each[0])]


def _score(completion: Completion) -> Score:
    told = [each for each in completion.prompt_logprobs or () if each is not None]
    logprobs = (*told, *(completion.logprobs or ()))
    return Score(sum(each.logprob for each in logprobs), logprobs)


def _request(prompt: list[int], own: list[int], logprobs: int, place: int, device: torch.device) -> Submission:
    params = SamplingParams(
        max_new_tokens=1,
        ignore_eos=True,
        num_speculative_tokens=0,
        allowed_token_ids=(own[-1],),
        logprobs=logprobs,
        prompt_logprobs=logprobs if len(own) > 1 else None,
        prompt_logprobs_start=len(prompt),
    )
    return Submission([*prompt, *own[:-1]], params.of_request(place, device), 0, ())


def _encoded(completions: Prompts, tokenizer: Any) -> list[list[int]]:
    """As prompts are, but a text gets no special tokens: it goes on after its prompt."""
    try:
        found = encode_prompts(completions, partial(tokenizer, add_special_tokens=False))
    except InvalidInputError as error:
        raise InvalidInputError(f"completions are given as prompts are: {error}") from None
    if not all(found):
        raise InvalidInputError(f"completion {found.index([])} is empty; each has one token at least")
    return found
