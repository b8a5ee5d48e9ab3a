"""Apply the options of requests to the scores of their logits rows, in transformers' order.

Rules whose effect follows from lengths alone are worked out on the host; those that read drafts run on the device
(`forms.py`). Filters of sampled requests are transformers' own classes.

Source: huggingface/transformers, generation/utils.py `_get_logits_processor`; a token's bias (`logit_bias`) is added
with the other biases, the penalties of OpenAI follow the repetition penalty, `allowed_token_ids` comes with the
suppressed ids, as in vllm-project/vllm, vllm/v1/sample/sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from transformers.generation import logits_process as hf

from attention.cached import cached_property
from attention.staging import on_device
from specdec.logits.forms import (
    NOBODY,
    TokenPrefixes,
    add_sequence_bias,
    ban_repeated_ngrams,
    penalise_tokens,
    subtract_counts,
)
from specdec.options.logits_options import OFF, SAMPLED_ONLY, WITHOUT_EFFECT, Biases, TokenBiases
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import RequestProcessors, call_together
from specdec.values import Options, TokenIds, without

_NEVER = float("-inf")


_WARPERS: dict[str, Callable[..., hf.LogitsProcessor]] = {
    "temperature": hf.TemperatureLogitsWarper,
    "top_h": hf.TopHLogitsWarper,
    "top_k": hf.TopKLogitsWarper,
    "top_p": hf.TopPLogitsWarper,
    "min_p": hf.MinPLogitsWarper,
    "typical_p": hf.TypicalLogitsWarper,
    "epsilon_cutoff": hf.EpsilonLogitsWarper,
    "eta_cutoff": hf.EtaLogitsWarper,
}
"""Temperature and filters of sampled requests in the order in which they apply, and transformers' classes for them."""
_OFF = {**OFF, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
Filters = tuple[float | None, ...]
"""Values of a sampled request for the options in `_WARPERS`."""


def filters_of(params: SamplingParams) -> Filters | None:
    """All filters of a sampled request that sets one of `SAMPLED_ONLY`: they are applied here, in their order.

    None where the round applies them, and of a greedy request.
    """
    if params.greedy or not params.settings.keys() & set(SAMPLED_ONLY):
        return None
    return tuple(getattr(params, name) for name in _WARPERS)


@dataclass(frozen=True)
class Subject:
    """One request, as its options see it.

    Attributes:
        params: of the request, with its own copies of the user's code.
        prompt_len: tokens of its prompt. limit: most tokens, of prompt and new ones. ends: token ids that end it.
    """

    params: SamplingParams
    prompt_len: int
    limit: int
    ends: TokenIds

    @cached_property
    def settings(self) -> Options:
        """Options that change its scores, by name; filters are not among them."""
        left = SAMPLED_ONLY + WITHOUT_EFFECT
        return without(self.params.settings, left)

    def get(self, name: str) -> Any:
        """An option; its value for off where it is not set."""
        return self.settings.get(name, OFF[name])

    @property
    def watch(self) -> RequestProcessors | None:
        """Gets the largest score after all options."""
        own = self.params
        found = own.logits_processor or own.prefix_allowed_tokens_fn or own.watch
        assert found is None or isinstance(found, RequestProcessors), "not copied for its request"
        return found

    @cached_property
    def rules(self) -> tuple[tuple[int, Hashable], ...]:
        """The rules that apply to it, by their place in RULES, each with its setting."""
        settings = ((place, setting(self)) for place, (setting, _) in enumerate(RULES))
        return tuple((place, own) for place, own in settings if own)

    @property
    def has_code(self) -> bool:
        """Whether code of the user's changes its scores."""
        return not self.params.logits_processor is self.params.prefix_allowed_tokens_fn is None

    @cached_property
    def reads_prefix(self) -> bool:
        """Whether any option needs the tokens before a position, not just their number."""
        sequences = (*self.get("sequence_bias"), *_bad_words(self))
        longer = any(len(ids) > 1 for ids, _ in sequences)
        return self.has_code or longer or any(name in self.settings for name in _OF_TOKENS)


_OF_TOKENS = (
    *("encoder_repetition_penalty", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)


@dataclass(frozen=True)
class LogitsRows:
    """N logits rows of requests with options.

    Attributes:
        subjects: [N] the request of each. lens: [N] int64 tokens before each, on the host. prefixes: the tokens, on the
            device.
    """

    subjects: tuple[Subject, ...]
    lens: ndarray
    prefixes: TokenPrefixes

    def some(self, index: Sequence[int]) -> LogitsRows:
        """Some of them, in this order."""
        at = _indices(index, self._device)
        return LogitsRows(tuple(self.subjects[n] for n in index), self.lens[list(index)], self.prefixes.rows(at))

    def floats(self, name: str) -> Tensor:
        """[N] float32, an option of each row."""
        return on_device(np.array([s.get(name) for s in self.subjects], np.float32), self._device)

    @property
    def _device(self) -> torch.device:
        return self.prefixes.ids.device


Rule = tuple[Callable[[Subject], Any], Callable[[Tensor, LogitsRows, Any], None]]
"""A rule's setting for a request (False, None, 0 or () if it is off), and the change of the scores [N, V+1] of rows
with equal settings."""


def process(scores: Tensor, rows: LogitsRows) -> None:
    """Change scores [N, V+1] float32 in place by the options of their rows; the last column is no token's."""
    groups: dict[tuple[int, Hashable], list[int]] = {}
    for n, subject in enumerate(rows.subjects):
        for rule in subject.rules:
            groups.setdefault(rule, []).append(n)
    for (place, own), index in sorted(groups.items(), key=lambda group: group[0][0]):
        _, apply = RULES[place]
        if len(index) == len(rows.subjects):
            apply(scores, rows, own)
            continue
        at = _indices(index, scores.device)
        part = scores[at]
        apply(part, rows.some(index), own)
        scores[at] = part
    if watched := [(n, s.params, watch) for n, s in enumerate(rows.subjects) if (watch := s.watch) is not None]:
        largest = scores[:, :-1].amax(1).to("cpu", non_blocking=True)  # the device is not waited for
        for n, params, watch in watched:
            watch.note_largest(int(rows.lens[n]), largest, n, params.temperature)


def _indices(values: Sequence[object], device: torch.device) -> Tensor:
    return on_device(np.array(values, np.int64), device)


def _write(scores: Tensor, places: Iterable[tuple[int, int]], value: float) -> None:
    """Set scores of (row, token) to a value; tokens beyond V are left out."""
    own = np.array([(n, token) for n, token in places if token < scores.shape[1] - 1], np.int64).reshape(-1, 2)
    if len(own):
        at = on_device(own, scores.device)
        scores.index_put_((at[:, 0], at[:, 1]), scores.new_full((), value))


def _ids(ids: Iterable[int], scores: Tensor) -> Tensor:
    return _indices([i for i in ids if i < scores.shape[1] - 1], scores.device)


def _sequence_bias(scores: Tensor, rows: LogitsRows, biases: Biases) -> None:
    most = max(len(ids) for ids, _ in biases)
    table = np.array([(0,) * (most - len(ids)) + ids for ids, _ in biases], np.int64)
    lens = np.array([len(ids) for ids, _ in biases], np.int64)
    values = np.array([bias for _, bias in biases], np.float32)
    add_sequence_bias(scores, rows.prefixes, *(on_device(each, scores.device) for each in (table, lens, values)))


def _logit_bias(scores: Tensor, rows: LogitsRows, biases: TokenBiases) -> None:
    known = [(token, bias) for token, bias in biases if token < scores.shape[1] - 1]
    at = _indices([token for token, _ in known], scores.device)
    scores[:, at] += on_device(np.array([bias for _, bias in known], np.float32), scores.device)


def _encoder_repetition(scores: Tensor, rows: LogitsRows, _: bool) -> None:
    own = rows.prefixes.there & rows.prefixes.prompt_mask()
    # The inverse, as in transformers: above 1 the option favours tokens of the prompt.
    inverse = 1 / np.array([s.get("encoder_repetition_penalty") for s in rows.subjects])
    penalise_tokens(scores, rows.prefixes.ids, own, on_device(inverse.astype(np.float32), scores.device))


def _repetition(scores: Tensor, rows: LogitsRows, _: bool) -> None:
    penalise_tokens(scores, rows.prefixes.ids, rows.prefixes.there, rows.floats("repetition_penalty"))


def _counts(scores: Tensor, rows: LogitsRows, _: bool) -> None:
    subtract_counts(scores, rows.prefixes, rows.floats("frequency_penalty"), rows.floats("presence_penalty"))


def _ngrams(scores: Tensor, rows: LogitsRows, size: int, in_prompt: bool = False) -> None:
    ban_repeated_ngrams(scores, rows.prefixes, size, in_prompt=in_prompt)


def _bad_words(subject: Subject) -> Biases:
    ends = {(end,) for end in subject.ends}
    return tuple((ids, _NEVER) for ids in subject.get("bad_words_ids") if ids not in ends)


def _no_end_yet(scores: Tensor, rows: LogitsRows, _: bool) -> None:
    least = (max(s.get("min_length"), s.prompt_len + s.get("min_new_tokens")) for s in rows.subjects)
    early = [n for n, most in enumerate(least) if rows.lens[n] < most]
    _write(scores, ((n, end) for n in early for end in rows.subjects[n].ends), _NEVER)


def _forced_first(scores: Tensor, rows: LogitsRows, tokens: TokenIds) -> None:
    _force(scores, [n for n, length in enumerate(rows.lens) if length == 1], tokens)


def _forced_last(scores: Tensor, rows: LogitsRows, tokens: TokenIds) -> None:
    _force(scores, [n for n, s in enumerate(rows.subjects) if rows.lens[n] == s.limit - 1], tokens)


def _force(scores: Tensor, rows: list[int], tokens: TokenIds) -> None:
    if rows:
        scores[_indices(rows, scores.device), :-1] = _NEVER
        # 0: every other score is -inf, so a single forced token has probability 1 after any filter and temperature.
        _write(scores, ((n, token) for n in rows for token in tokens), 0.0)


def _finite(scores: Tensor, rows: LogitsRows, _: bool) -> None:
    scores[:, :-1] = hf.InfNanRemoveLogitsProcessor()(None, scores[:, :-1])


def _decay(scores: Tensor, rows: LogitsRows, decay: tuple[int, float]) -> None:
    start, factor = decay
    over = [int(length) - s.prompt_len - start for s, length in zip(rows.subjects, rows.lens, strict=True)]
    late = [(n, end, more) for n, more in enumerate(over) if more > 0 for end in rows.subjects[n].ends]
    with np.errstate(over="ignore"):  # infinite, where Python's own ** raises
        growth = np.array([np.float64(factor) ** more - 1 for *_, more in late], np.float64).astype(np.float32)
    if late:
        at = _indices([(n, end) for n, end, _ in late], scores.device)
        grown = on_device(growth, scores.device)
        own = scores[at[:, 0], at[:, 1]]
        added = (own.abs() * grown).masked_fill(~own.isfinite(), 0.0)
        scores.index_put_((at[:, 0], at[:, 1]), own + added)


def _suppress(scores: Tensor, rows: LogitsRows, tokens: TokenIds) -> None:
    scores[:, _ids(tokens, scores)] = _NEVER


def _allow(scores: Tensor, rows: LogitsRows, tokens: TokenIds) -> None:
    at = _ids(tokens, scores)
    kept = scores[:, at]
    scores[:, :-1] = _NEVER
    scores[:, at] = kept


def _suppress_first(scores: Tensor, rows: LogitsRows, tokens: TokenIds) -> None:
    first = [n for n, s in enumerate(rows.subjects) if rows.lens[n] == _begin(s)]
    _write(scores, ((n, token) for n in first for token in tokens), _NEVER)


def _begin(subject: Subject) -> int:
    """Length at which `begin_suppress_tokens` applies: after a forced first token, if any."""
    forced = subject.prompt_len == 1 and "forced_bos_token_id" in subject.settings
    return subject.prompt_len + forced


def _by_the_user(scores: Tensor, rows: LogitsRows, option: str) -> None:
    """Of each request by its own, which gets views of its rows: they are neighbours."""
    each = [cast(RequestProcessors, getattr(subject.params, option)) for subject in rows.subjects]
    with torch.inference_mode(False), torch.no_grad():
        ids, found = rows.prefixes.ids.clone(), scores[:, :-1].clone()  # the code may keep them, and change them
        for own, index in groupby(range(len(each)), each.__getitem__):
            at = list(index)
            part = slice(at[0], at[-1] + 1)
            own.apply(ids[part], rows.lens[part].tolist(), found[part])
    scores[:, :-1] = found


def _by_the_users_processors(scores: Tensor, rows: LogitsRows, own: str | TokenIds) -> None:
    """own: the option, or which objects are called for the rows of all requests that have them."""
    if not isinstance(own, str):
        ids = rows.prefixes.tails(int(rows.lens.max()))
        padded = torch.where(ids == NOBODY, rows.prefixes.ids[:, :1], ids)
        first = cast(RequestProcessors, rows.subjects[0].params.logits_processor)
        if call_together(first.together, padded, scores[:, :-1]):
            return
    _by_the_user(scores, rows, "logits_processor")


def _filtered(scores: Tensor, rows: LogitsRows, filters: Filters) -> None:
    """All filters of sampled requests, by transformers' classes. The scores are multiplied by the temperature
    afterwards, by which the round divides them. Rows without a token stay as they are: some classes raise for these."""
    given = scores[:, :-1]
    lost = ~given.amax(1, keepdim=True).isfinite()
    found = given.masked_fill(lost, 0.0)
    for (name, kind), own in zip(_WARPERS.items(), filters, strict=True):
        if own is not None and own != _OFF.get(name):
            device = {"device": str(scores.device)} if name == "eta_cutoff" else {}
            found = kind(own, **device)(None, found)
    scores[:, :-1] = torch.where(lost, given, found * (filters[0] or 1.0))


def _set(*names: str) -> Callable[[Subject], Hashable]:
    """Whether any of these options is on: rows with different values are changed together."""
    return lambda subject: any(name in subject.settings for name in names)


def _value(name: str) -> Callable[[Subject], Hashable]:
    """An option's value: rows with equal values are changed together."""
    return lambda subject: subject.settings.get(name)


def _first_token(subject: Subject) -> Hashable:
    token = subject.settings.get("forced_bos_token_id")
    return None if token is None else (token,)


def _processors(subject: Subject) -> Hashable:
    """The option, or by identity the objects that are called once for all requests which have them."""
    own = subject.params.logits_processor
    return isinstance(own, RequestProcessors) and (tuple(map(id, own.together)) or "logits_processor")


RULES: tuple[Rule, ...] = (
    (_value("sequence_bias"), _sequence_bias),
    (_value("logit_bias"), _logit_bias),
    (_set("encoder_repetition_penalty"), _encoder_repetition),
    (_set("repetition_penalty"), _repetition),
    (_set("frequency_penalty", "presence_penalty"), _counts),
    (_value("no_repeat_ngram_size"), _ngrams),
    (_value("encoder_no_repeat_ngram_size"), partial(_ngrams, in_prompt=True)),
    (_bad_words, _sequence_bias),
    (_set("min_length", "min_new_tokens"), _no_end_yet),
    (lambda subject: subject.params.prefix_allowed_tokens_fn and "prefix_allowed_tokens_fn", _by_the_user),
    (_first_token, _forced_first),
    (_value("forced_eos_token_id"), _forced_last),
    (_set("remove_invalid_values"), _finite),
    (_value("exponential_decay_length_penalty"), _decay),
    (_value("suppress_tokens"), _suppress),
    (_value("allowed_token_ids"), _allow),
    (_value("begin_suppress_tokens"), _suppress_first),
    (_processors, _by_the_users_processors),
    (lambda subject: filters_of(subject.params), _filtered),
)
"""In the order in which they apply."""
