"""LogitsOptions: the options of a request that change logits before a token is decided.

Names, meaning and order follow transformers' GenerationConfig; presence and frequency penalty, logit_bias and
allowed_token_ids follow OpenAI and vLLM.

Source: huggingface/transformers, generation/utils.py `_get_logits_processor` (order), generation/logits_process.py
(formulas); vllm-project/vllm, vllm/v1/sample (presence and frequency penalty after the repetition penalty).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec.errors import InvalidInputError
from specdec.values import Options, Reader, TokenIds, flag, number, read_options, refuse, whole

Sequences = tuple[TokenIds, ...]
Biases = tuple[tuple[TokenIds, float], ...]
TokenBiases = tuple[tuple[int, float], ...]
"""Sequences of token ids, each with one or more; and single ids."""


@dataclass(frozen=True, kw_only=True)
class LogitsOptions:
    """Options that change a request's logits. None: off.

    They apply at every position in the order below, before temperature; options applied after it come last. A
    position's prefix is the prompt and every new token before it, drafts included.

    Attributes:
        sequence_bias: {token ids: bias}; the bias is added to the last of the ids where the others are the last tokens.
            Pairs of a list of ids and a bias are read too, as in transformers.
        logit_bias: {token id: bias}, added to its logit. OpenAI's range of ±100 is not enforced.
        encoder_repetition_penalty: above 1 favours tokens of the prompt, below 1 penalises them.
        repetition_penalty: logits of tokens in the prefix are divided by it where positive, multiplied where negative.
        frequency_penalty: subtracted from a token's logit for each time that it is among the new ones.
        presence_penalty: subtracted once from the logits of tokens that are among the new ones.
        no_repeat_ngram_size: no n tokens occur twice in the prefix.
        encoder_no_repeat_ngram_size: no n tokens of the prompt occur again among the new ones.
        bad_words_ids: sequences of token ids that are not generated; single eos ids among them are ignored.
        min_length: ids that end the request (eos, stop_token_ids) have no probability before so many tokens, of prompt
            and new ones together.
        min_new_tokens: the same before so many new tokens.
        forced_bos_token_id: the first new token after a prompt of one token.
        forced_eos_token_id: the last new token that the length allows, an id or several.
        remove_invalid_values: NaN becomes 0, infinities the largest finite numbers.
        exponential_decay_length_penalty: (start, factor): from start new tokens on the logits of ids that end the
            request grow by |logit| · (factor^(new - start) - 1); not those that a least length has taken away (of which
            transformers makes NaN, and ends the request).
        suppress_tokens: ids that are not generated.
        begin_suppress_tokens: ids that are not the first new token.
        allowed_token_ids: only these ids are generated.
        top_h: of sampled requests, between temperature and top_k: keep the most probable tokens up to this share of the
            distribution's entropy. As the next three, which follow min_p, without effect on greedy requests.
        typical_p: keep tokens whose information is nearest to the entropy, up to this mass.
        epsilon_cutoff: keep tokens with at least this probability.
        eta_cutoff: keep tokens above a limit of probability that falls with the entropy.
        renormalize_logits: log-probabilities in place of logits, at the end. No token changes, but `Completion.scores`.
    """

    sequence_bias: Biases | None = None
    logit_bias: TokenBiases | None = None
    encoder_repetition_penalty: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequences | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: TokenIds | None = None
    remove_invalid_values: bool | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: TokenIds | None = None
    begin_suppress_tokens: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    renormalize_logits: bool | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError: a value that is not of its kind or outside its range."""
        read_options(self, _READ)
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(self.suppress_tokens or ()):
            # bad_words_ids are not checked: eos ids among them have no effect, and these are not known here.
            raise InvalidInputError("allowed_token_ids are all among suppress_tokens: no token could be generated")

    @property
    def settings(self) -> Options:
        """Options that do something, by name."""
        own = ((name, getattr(self, name), off) for name, off in OFF.items())
        return {name: given for name, given, off in own if given is not None and given != off}

    @property
    def token_ids(self) -> set[int]:
        """Every token id that an option names."""
        found = {i for ids, _ in self.sequence_bias or () for i in ids} | {i for i, _ in self.logit_bias or ()}
        found |= {i for ids in self.bad_words_ids or () for i in ids}
        lists = (self.suppress_tokens, self.begin_suppress_tokens, self.forced_eos_token_id, self.allowed_token_ids)
        found |= {i for ids in lists for i in ids or ()}
        return found if self.forced_bos_token_id is None else found | {self.forced_bos_token_id}


def largest_bias(options: LogitsOptions) -> tuple[int, float]:
    """The token to which biases above 0 may add most, and how much; (-1, 0) without such biases."""
    sums = defaultdict[int, float](float)
    for ids, bias in (*(options.sequence_bias or ()), *(((i,), bias) for i, bias in options.logit_bias or ())):
        sums[ids[-1]] += max(bias, 0.0)
    return max(sums.items(), key=lambda item: item[1], default=(-1, 0.0))


_COUNT = partial(whole, least=0, most=None, allowed="0 (off) or more, a whole number")
_ONE_ID = partial(whole, least=0, most=None, allowed="None, or a token id")
_PENALTY = number("a number above 0; 1.0 is off", lambda x: 0 < x < math.inf)
_FILTER = number("in (0, 1]; 1.0 is off", lambda x: 0 < x <= 1)
_CUTOFF = number("0 (off) or more, below 1", lambda x: 0 <= x < 1)
_SUBTRACTED = number("a finite number; 0.0 is off", math.isfinite)
_BIAS = number("a bias that is a finite number or -inf", lambda x: x < math.inf)


def token_ids(name: str, given: Any) -> TokenIds:
    """Token ids from any sequence of whole numbers, or from a single number.

    Raises:
        InvalidInputError: something else, or a negative number.
    """
    allowed = "a list of token ids, whole numbers from 0"
    if isinstance(given, (str, bytes, Mapping)):
        raise refuse(name, given, allowed)
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        given = [given]
    return tuple(whole(name, one, 0, None, allowed) for one in given)


def _allowed(name: str, given: Any) -> TokenIds:
    ids = tuple(sorted(set(token_ids(name, given))))
    if not ids:
        raise InvalidInputError(f"{name} is empty: no token could be generated; give token ids, or None for all")
    return ids


def _sequences(name: str, given: Any) -> Sequences:
    allowed = "a list of lists of token ids, each with one or more"
    # Iterables that would be read item by item without an error: letters, bytes, keys.
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise refuse(name, given, allowed)
    found = []
    for ids in given:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable) or not (own := token_ids(name, ids)):
            raise refuse(name, given, allowed)
        found.append(own)
    return tuple(found)


def _biases(name: str, given: Any) -> Biases:
    allowed = "{(token id, …): bias}, or a list of pairs ([token id, …], bias)"
    found = {}
    for ids, bias in _pairs(name, given, allowed):
        own = _sequences(name, [ids])[0] if isinstance(ids, Iterable) else token_ids(name, ids)
        found[own] = _BIAS(name, bias)
    return tuple(found.items())


def _token_biases(name: str, given: Any) -> TokenBiases:
    allowed = "{token id: bias}, or a list of pairs (token id, bias)"
    found = {}
    for key, bias in _pairs(name, given, allowed):
        is_number = isinstance(key, str) and key.isdecimal() and len(key) < 20  # OpenAI's keys are JSON's: strings
        number = int(key) if is_number else key
        found[whole(name, number, 0, None, allowed)] = _BIAS(name, bias)
    return tuple(found.items())


def _pairs(name: str, given: Any, allowed: str) -> list[Any]:
    each = given.items() if isinstance(given, Mapping) else given
    if isinstance(each, (str, bytes)) or not isinstance(each, Iterable):
        raise refuse(name, given, allowed)
    pairs = list(each)
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise refuse(name, given, allowed)
    return pairs


def _decay(name: str, given: Any) -> tuple[int, float]:
    allowed = "None, or (start, factor): a whole number from 0 and a number above 0"
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise refuse(name, given, allowed)
    return whole(name, given[0], 0, None, allowed), number(allowed, lambda x: 0 < x < math.inf)(name, given[1])


_READ: dict[str, Reader] = {
    "sequence_bias": _biases,
    "logit_bias": _token_biases,
    "encoder_repetition_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "frequency_penalty": _SUBTRACTED,
    "presence_penalty": _SUBTRACTED,
    "no_repeat_ngram_size": _COUNT,
    "encoder_no_repeat_ngram_size": _COUNT,
    "bad_words_ids": _sequences,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "forced_bos_token_id": _ONE_ID,
    "forced_eos_token_id": token_ids,
    "remove_invalid_values": flag,
    "exponential_decay_length_penalty": _decay,
    "suppress_tokens": token_ids,
    "begin_suppress_tokens": token_ids,
    "allowed_token_ids": _allowed,
    "top_h": _FILTER,
    "typical_p": _FILTER,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "renormalize_logits": flag,
}
OFF: Options = dict.fromkeys(_READ) | {
    **dict.fromkeys(("sequence_bias", "logit_bias", "bad_words_ids", "forced_eos_token_id"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ()),
    **dict.fromkeys(("encoder_repetition_penalty", "repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits"), False),
}
"""Every option, with the value that switches it off."""
SAMPLED_ONLY = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Options that greedy requests ignore, as in transformers."""
WITHOUT_EFFECT = ("renormalize_logits",)
"""Options that change no token."""
