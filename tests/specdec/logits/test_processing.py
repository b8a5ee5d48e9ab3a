"""The rules of requests' options, one at a time, on scores written out: at which position each applies, and to what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from specdec.logits.forms import NOBODY, TokenPrefixes
from specdec.logits.processing import LogitsRows, Subject, process
from specdec.requests.sampling import SamplingParams

VOCAB, EOS = 8, 3
SCORES = torch.tensor([0.5, -1.0, 2.0, 1.5, -0.5, 0.25, 3.0, -2.0])
NEVER = -torch.inf
TEXT = [5, 1, 6, 2, 6, 4, 1]


def subject(settings: dict[str, Any], prompt_len: int, limit: int = 40, ends: tuple[int, ...] = (EOS,)) -> Subject:
    return Subject(SamplingParams(**settings), prompt_len, limit, ends)


def processed(*each: tuple[Subject, list[int]], scores: torch.Tensor = SCORES) -> torch.Tensor:
    """[N, V]: what is left of the same scores before the next token of each text."""
    lens = [len(text) for _, text in each]
    ids = [text + [NOBODY] * (max(lens) - len(text)) for _, text in each]
    prompts = torch.tensor([own.prompt_len for own, _ in each])
    prefixes = TokenPrefixes(torch.tensor(ids), torch.tensor(lens), prompts)
    wide = torch.cat([scores, torch.zeros(1)]).repeat(len(each), 1)
    process(wide, LogitsRows(tuple(own for own, _ in each), np.array(lens), prefixes))
    return wide[:, :-1]


def lengths_at_which(settings: dict[str, Any], prompt_len: int, token: int, **more: Any) -> list[int]:
    """Tokens before those positions at which one has no probability."""
    own = subject(settings, prompt_len, **more)
    return [n for n in range(prompt_len, 10) if processed((own, [7] * n))[0, token] == NEVER]


@pytest.mark.parametrize(("prompt_len", "forced", "at"), [(1, False, 1), (4, False, 4), (1, True, 2), (4, True, 4)])
def test_tokens_are_suppressed_at_the_begin(prompt_len: int, forced: bool, at: int) -> None:
    """Of the answer; after a forced first token where a prompt of one token has one, as in transformers."""
    settings: dict[str, Any] = {"begin_suppress_tokens": (6,)} | ({"forced_bos_token_id": 6} if forced else {})
    assert lengths_at_which(settings, prompt_len, 6) == [at]


@pytest.mark.parametrize(("prompt_len", "at"), [(1, [1]), (4, [])])
def test_the_first_token_is_forced_after_a_prompt_of_one(prompt_len: int, at: list[int]) -> None:
    assert lengths_at_which({"forced_bos_token_id": 6}, prompt_len, 2) == at
    assert 6 not in lengths_at_which({"forced_bos_token_id": 6}, prompt_len, 6)


def test_the_last_token_is_forced() -> None:
    settings = {"forced_eos_token_id": (3, 5)}
    assert lengths_at_which(settings, 2, 6, limit=7) == [6]
    assert processed((subject(settings, 2, limit=7), [7] * 6))[0].tolist() == [
        0.0 if token in (3, 5) else NEVER for token in range(VOCAB)
    ]


@pytest.mark.parametrize(
    ("settings", "last"),
    [({"min_length": 5}, 4), ({"min_new_tokens": 3}, 4), ({"min_length": 6, "min_new_tokens": 1}, 5)],
)
def test_no_end_comes_before_the_least_length(settings: dict[str, Any], last: int) -> None:
    """The ends of a request, and nothing else."""
    for token, at in ((EOS, list(range(2, last + 1))), (4, list(range(2, last + 1))), (6, [])):
        assert lengths_at_which(settings, 2, token, ends=(EOS, 4)) == at


def test_the_decay_counts_new_tokens_and_leaves_what_may_not_come() -> None:
    settings = {"exponential_decay_length_penalty": (2, 1.5)}
    for new in range(5):
        theirs = hf.ExponentialDecayLengthPenalty((2, 1.5), torch.tensor([EOS]), 3)
        ids = torch.full((1, 3 + new), 7)
        assert torch.allclose(
            processed((subject(settings, 3), ids[0].tolist()))[0], theirs(ids, SCORES[None].clone())[0]
        )
    banned = SCORES.index_fill(0, torch.tensor([EOS]), NEVER)
    endless = subject({"exponential_decay_length_penalty": (0, 1e30)}, 1)
    assert torch.equal(processed((endless, [7] * 9), scores=banned)[0], banned)


def test_penalties_of_the_prompt_and_of_all() -> None:
    prompt = torch.tensor([TEXT[:3]])
    theirs = hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, prompt)(torch.tensor([TEXT]), SCORES[None].clone())
    assert torch.allclose(processed((subject({"encoder_repetition_penalty": 1.5}, 3), TEXT)), theirs)
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([TEXT]), SCORES[None].clone())
    assert torch.allclose(processed((subject({"repetition_penalty": 1.5}, 3), TEXT)), theirs)


def test_openais_penalties_count_new_tokens() -> None:
    """2, 6, 4 and 1 are new, 6 twice if the prompt ends before the first."""
    own = subject({"frequency_penalty": 0.5, "presence_penalty": 0.25}, 2)
    right = SCORES.clone()
    for token in (2, 4, 1):
        right[token] -= 0.75
    right[6] -= 1.25
    assert torch.allclose(processed((own, TEXT))[0], right)


def test_options_apply_in_their_order_whatever_others_have() -> None:
    """One request has a penalty alone; the other's bias comes before its penalty all the same."""
    alone, both = (
        subject({"repetition_penalty": 2.0}, 3),
        subject({"repetition_penalty": 2.0, "logit_bias": ((6, -5.0),)}, 3),
    )
    first, second = processed((alone, TEXT), (both, TEXT))
    assert torch.equal(first, processed((alone, TEXT))[0]) and torch.equal(second, processed((both, TEXT))[0])
    assert first[6] == 1.5 and second[6] == -4.0


def test_an_end_is_no_bad_word() -> None:
    own = subject({"bad_words_ids": ((EOS,), (4,), (1, 0))}, 3)
    assert (processed((own, TEXT))[0] == NEVER).nonzero().flatten().tolist() == [0, 4]


def test_allowed_tokens_keep_their_logits_and_ids_beyond_the_vocabulary_are_none() -> None:
    (left,) = processed((subject({"allowed_token_ids": (1, 6, 8, 12), "suppress_tokens": (0, 8, 12)}, 3), TEXT))
    assert left.tolist() == [NEVER, -1.0, NEVER, NEVER, NEVER, NEVER, 3.0, NEVER]
    (left,) = processed((subject({"begin_suppress_tokens": (0, 8, 12), "logit_bias": ((12, 9.0),)}, len(TEXT)), TEXT))
    assert torch.equal(left, SCORES.index_fill(0, torch.tensor([0]), NEVER))


def test_filters_leave_logits_that_the_round_divides_by_the_temperature() -> None:
    """And rows without a token as they are, beside others."""
    filters = {"temperature": 0.5, "top_h": 0.7, "typical_p": 0.9}
    own = subject(filters, 3)
    empty = subject({"suppress_tokens": tuple(range(VOCAB)), **filters}, 3)
    left, none = processed((own, TEXT), (empty, TEXT))
    warped = hf.TypicalLogitsWarper(0.9)(None, hf.TopHLogitsWarper(0.7)(None, SCORES[None] / 0.5))[0]
    assert torch.allclose(left / 0.5, warped) and (left == NEVER).any()
    assert (none == NEVER).all()


def test_equal_rules_change_their_own_rows_alone() -> None:
    plain, own = subject({}, 3), subject({"suppress_tokens": (2,)}, 3)
    found = processed((plain, TEXT), (own, TEXT[:4]), (plain, TEXT[:3]), (own, TEXT))
    assert (found[:, 2] == NEVER).tolist() == [False, True, False, True]
    assert torch.equal(found[::2], SCORES.repeat(2, 1))
