"""SamplingParams: how a request is sampled, and the same of several rows as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.cached import cached_property
from attention.staging import array_names, dtype_of
from specdec.config import SEEDS
from specdec.errors import InvalidInputError
from specdec.ops.draws import SamplingParameters
from specdec.options.arguments import only_known_fields, unexpected
from specdec.options.logits_options import LogitsOptions, largest_bias, token_ids
from specdec.requests.grammar import DecidedElsewhere, grammar
from specdec.requests.logprobs import MOST_LOGPROBS, LogprobsMode, PromptLogprobs, TokenRows
from specdec.requests.shown import changed_fields
from specdec.requests.user_code import (
    Constrained,
    Criterion,
    PrefixFunction,
    Processor,
    RequestCriteria,
    RequestProcessors,
    UserCodeError,
    criteria,
    overlapping,
    prefix_function,
    processors,
)
from specdec.values import (
    Options,
    Reader,
    TokenIds,
    are_texts,
    choice,
    flag,
    number,
    read_options,
    refuse,
    short,
    whole,
)

MAX_TOP_K = 2**31 - 1
MAX_N = 2**16
_MOST = float(np.finfo(np.float32).max)
_FEW = {"grammar", "allowed_token_ids", "forced_bos_token_id", "forced_eos_token_id"}
"""Options that leave few tokens, of which others may leave none."""
_USER_CODE = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria")
TEMPERATURES = (1e-6, 1e6)
"""Smallest and largest temperature: beyond them logits divided by it are infinite or all equal in float32."""


@only_known_fields
@dataclass(frozen=True)
class SamplingParams(LogitsOptions):
    """How one request is sampled and when it ends; options that change its logits are those of `LogitsOptions`.

    Nothing is added to it: of the model's generation_config only the eos ids apply (`from_model` reads the rest, and
    calls that give options by name alone start from it). Numbers may be numpy or torch scalars; they are kept as int
    and float.

    Attributes:
        max_new_tokens: most new tokens.
        temperature: 0 is greedy; otherwise, from 1e-6 to 1e6, logits are divided by it.
        top_k: keep the k most probable tokens (0: all).
        top_p: keep the smallest set with this mass (1.0: all).
        min_p: keep tokens with at least min_p times the top probability (0.0: all).
        stop: a string, or a list or tuple of strings, that end the request: with the first token after which its text
            contains one of them. The text ends before the string, the ids with that token. The text is
            `tokenizer.decode(new tokens, skip_special_tokens=True)` without an unfinished character at its end; a stop
            string may also contain special tokens as they are written. One that begins in the prompt, which
            transformers' stop_strings find, does not count.
        stop_token_ids: ids that end the request, in addition to the model's own eos ids.
        ignore_eos: continue past the model's eos ids.
        seed: fixes the request's randomness. In float32 the same prompt, SamplingParams, draft head and options of the
            model give the same tokens, drafts and rounds, whatever else is in the batch, however prompts are split into
            chunks, and after any preemption (but where a uniform falls closer to a boundary of the distribution than
            rounding). What it does not fix: another num_speculative_tokens (0 included) draws other tokens of the same
            distribution; another max_new_tokens may change the last K tokens, for which there are fewer drafts; in half
            precision logits round by the batch's shape, so that other requests may change a token ("batch_invariant"
            rules that out for the target, not for what the head drafts). None: the model's seed, and how many requests
            were submitted before.
        num_speculative_tokens: K of this request; None is the model's, 0 is no speculation (the same path).
        return_drafts: keep the draft ids of every round in `Completion.drafts`.
        n: completions of each prompt, in a row, as transformers' num_return_sequences. Sample i of a seed is the same
            whatever n is. Greedy decoding has one completion only: more are refused, as transformers refuses them.
        cache_prefix: begin with pages that earlier requests left in the prefix cache, and leave this one's there.
            False: neither. Without effect where the model was loaded with enable_prefix_caching=False.
        logits_processor: a transformers LogitsProcessor, any function of its kind, or a list of them. Each is called
            for every position of a verification, drafts included, with the tokens before it [1, L] and its scores [1,
            V] on the model's device, after the options and before temperature. What the last one returns is rounded to
            float32. It runs on the thread that leads the round; if it waits for the device, all requests wait. One with
            a state is copied (deepcopy) for each request and before each position; if that fails, it is called as it is
            and the request has no drafts (`RequestStats.not_drafted`). Functions are taken to have no state. What one
            raises ends its request alone.
        prefix_allowed_tokens_fn: (batch_id, tokens [L]) -> the ids that may follow, as in transformers; batch_id is the
            completion's place in its call.
        grammar: what the new tokens must spell: a `Grammar`, OpenAI's `response_format` as a dict, or an object with
            fill, advance and rollback. Exact at every position of a verification, drafts included; before options,
            temperature and filters. A request ends where its grammar does.
        stopping_criteria: a transformers StoppingCriteria, or a list of them: called once for each new token, in order,
            with all tokens [1, L] and None for scores; the request ends where one is true. Copied for each request; one
            that cannot be copied is shared by all requests that have it (a SpecdecWarning names it).
        logprobs: log-probabilities of each new token and of this many alternatives, the most probable ones, in
            `Completion.logprobs`; 0: of the tokens alone.
        logprobs_mode: "raw": of the model's own logits; "processed": of the distribution that the token was drawn from,
            after all options, processors, temperature and filters (a greedy request has no temperature); of prompt
            tokens, for which no processor runs, after temperature, top_k, top_p and min_p.
        prompt_logprobs: log-probabilities of the prompt's tokens and so many alternatives, in
            `Completion.prompt_logprobs`; of n samples the first one's alone. Their positions are read, not taken from
            the prefix cache, and a round computes the logits of few of them at once (specdec/logits/logprobs.py), so
            that long prompts take more rounds.
        prompt_logprobs_start: the first position of the prompt for which prompt_logprobs are given.
        return_logits: whole rows [V] of the model's own logits of each new token, in `Completion.logits`, as
            transformers' output_logits. They take 4 · V bytes a token, at most 2 GiB a request.
        return_scores: whole rows [V] of each new token after all options, processors, temperature and filters, in
            `Completion.scores`, as transformers' output_scores.
        max_time: seconds from its submission after which the request ends ("timeout"), waiting or running, with the
            tokens that it has; looked at once a round. None: no limit.
        strict_length: refuse a max_new_tokens for which max_model_len has no room after the prompt. False: the request
            ends where the room does ("length", `Completion.truncated_by`).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    seed: int | None = None
    num_speculative_tokens: int | None = None
    return_drafts: bool = False
    n: int = 1
    cache_prefix: bool = True
    logits_processor: Sequence[Processor] | RequestProcessors | None = None
    prefix_allowed_tokens_fn: PrefixFunction | RequestProcessors | None = None
    stopping_criteria: Sequence[Criterion] | RequestCriteria | None = None
    grammar: Any = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | PromptLogprobs | None = None
    prompt_logprobs_start: int = 0
    return_logits: bool | TokenRows = False
    return_scores: bool | TokenRows = False
    max_time: float | None = None
    strict_length: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidInputError: a value that is not of its kind or outside its range, or a processor of
        transformers beside the option that makes the same."""
        super().__post_init__()
        read_options(self, _READ)
        own = self.logits_processor
        for kind, option in overlapping(() if isinstance(own, RequestProcessors) else own or (), self.settings):
            raise InvalidInputError(
                f"logits_processor has a {kind.__name__} and {option}={short(getattr(self, option))} is set: give "
                "one of the two (an option of the model's own generation_config is switched off by its neutral value)"
            )
        token, top = largest_bias(self)
        if top > _MOST * (min(self.temperature, 1) or 1):
            raise InvalidInputError(
                f"biases of token {token} that add up to {top:g}, at temperature={self.temperature:g}: its logit would "
                "be infinite in float32; give smaller ones, or allowed_token_ids"
            )
        if self.n > 1 and self.greedy:
            raise InvalidInputError(
                f"n={self.n} with temperature=0: greedy decoding has one completion; give a temperature, or n=1"
            )

    def __repr__(self) -> str:
        """Without the fields that have their defaults."""
        return changed_fields(self)

    @property
    def told(self) -> tuple[str, ...]:
        """Names of the fields that ask for what is told of tokens beside them, which does not leave this process."""
        names = ("logprobs", "prompt_logprobs", "return_logits", "return_scores")
        return tuple(name for name in names if not (getattr(self, name) is None or getattr(self, name) is False))

    @property
    def user_code(self) -> tuple[str, ...]:
        """Names of the fields with code of the user's, which does not leave this process."""
        return tuple(name for name in _USER_CODE if getattr(self, name) is not None)

    @property
    def for_other_ranks(self) -> SamplingParams:
        """Without what the first of several ranks alone looks at, whose decisions the others take: text, the time, the
        user's code."""
        drafts = 0 if self.not_drafted else self.num_speculative_tokens
        code: Options = dict.fromkeys(_USER_CODE)
        code["grammar"] = None if self.grammar is None else DecidedElsewhere()
        return replace(self, stop=(), max_time=None, num_speculative_tokens=drafts, **code)

    @property
    def not_drafted(self) -> str:
        """Why a request with these has no drafts, in words; "" where nothing stands against them."""
        each = (self.logits_processor, self.prefix_allowed_tokens_fn)
        return next((own.not_copied for own in each if isinstance(own, RequestProcessors) and own.not_copied), "")

    def error_at(self, length: int) -> UserCodeError | None:
        """What code of the user's raised for the position after so many tokens, or why options leave none; or None."""
        own = {"prefix_allowed_tokens_fn": self.prefix_allowed_tokens_fn, "logits processor": self.logits_processor}
        # Options come first: where they leave none, the token that is taken all the same breaks the grammar, too.
        for name, code in {**own, "options": self.watch, "grammar": self.grammar}.items():
            told = getattr(code, "error_at", None)
            if told is not None and (error := told(length)) is not None:
                return UserCodeError(error, f"its {name}")
        return None

    @cached_property
    def watch(self) -> RequestProcessors | None:
        """Is told what options leave, where they may leave no token together; see `of_request`."""
        own = set(self.settings) | ({"grammar"} if self.grammar is not None else set())
        banned = bool(self.suppress_tokens) or any(bias == -np.inf for _, bias in self.logit_bias or ())
        return RequestProcessors(()) if banned or (len(own) > 1 and own & _FEW) else None

    def of_request(self, batch_id: int, device: torch.device) -> SamplingParams:
        """The same for one request, at this place of its call: the user's code copied, places for what is told to it.

        device: the model's.
        """
        makers: dict[str, Callable[[Any], object]] = {
            "logits_processor": RequestProcessors,
            "prefix_allowed_tokens_fn": lambda function: RequestProcessors((Constrained(function, batch_id),)),
            "stopping_criteria": lambda own: RequestCriteria(own, device),
            "prompt_logprobs": lambda count: PromptLogprobs(count, self.prompt_logprobs_start),
            "return_logits": lambda _: TokenRows(),
            "return_scores": lambda _: TokenRows(),
        }
        each = ((name, make, getattr(self, name)) for name, make in makers.items())
        found: Options = {
            name: make(own) for name, make, own in each if not (own is None or own is False or _is_made(own))
        }
        return replace(self, **found) if found or self.watch is not None else self

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0.0

    @classmethod
    def from_dict(cls, options: dict[str, object]) -> SamplingParams:
        """Build from a mapping.

        Raises:
            InvalidInputError: it is no mapping, or an option is unknown.
        """
        if not isinstance(options, Mapping):
            raise InvalidInputError(f"sampling options are a dict, not {short(options)}")
        known = [f.name for f in fields(cls)]
        if odd := {str(name): value for name, value in options.items() if name not in known}:
            raise unexpected("SamplingParams({})", dict(sorted(odd.items())), known, "unknown sampling option")
        return cls(**options)  # type: ignore[arg-type]

    @classmethod
    def from_model(cls, model: Any, **options: Any) -> SamplingParams:
        """From the model's own generation_config, as calls by name start: do_sample, temperature, top_k, top_p, min_p,
        options that change logits, stop_strings, max_new_tokens, max_time and num_return_sequences; unset ones as
        transformers' `generate` takes them (top_k=50 when sampling), without max_new_tokens 256.

        Args:
            model: a SpeculativeModel or a transformers model.
            options: fields of SamplingParams that replace what is read.

        Raises:
            InvalidInputError: it samples in a way that is not supported (typical_p, epsilon_cutoff, …), an option is
                unknown, or this is no model.
        """
        from specdec.options.generation_config import sampling_of_model

        return cls.from_dict({**sampling_of_model(model), **options})


def _stops(name: str, given: Any) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, (tuple, list)) or not are_texts(stops):
        raise refuse(name, given, "a string or a list of strings: non-empty strings")
    return tuple(stops)


def _stop_ids(name: str, given: Any) -> TokenIds:
    if not isinstance(given, (tuple, list)):
        raise refuse(name, given, "a list of token ids")
    return token_ids(name, given)


def _is_made(given: Any) -> bool:
    """Whether it is what `SamplingParams.of_request` has made of an option."""
    return isinstance(given, (RequestProcessors, RequestCriteria, PromptLogprobs, TokenRows))


def _unless_made(read: Reader) -> Reader:
    return lambda name, given: given if _is_made(given) else read(name, given)


_LOGPROBS = partial(whole, least=0, most=MOST_LOGPROBS, allowed=f"None or 0 to {MOST_LOGPROBS}")
_READ: dict[str, Reader] = {
    "max_new_tokens": partial(whole, least=1, most=None, allowed="at least 1, a whole number"),
    "temperature": number(
        "0 (greedy), or {:g} to {:g}".format(*TEMPERATURES), lambda x: x == 0 or TEMPERATURES[0] <= x <= TEMPERATURES[1]
    ),
    "top_k": partial(whole, least=0, most=MAX_TOP_K, allowed=f"0 (off) or more, a whole number up to {MAX_TOP_K}"),
    "top_p": number("in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": number("in [0, 1]", lambda x: 0 <= x <= 1),
    "stop": _stops,
    "stop_token_ids": _stop_ids,
    "ignore_eos": flag,
    "seed": partial(whole, least=SEEDS[0], most=SEEDS[1], allowed="None or a whole number of 64 bits"),
    "num_speculative_tokens": partial(whole, least=0, most=None, allowed="None or 0 or more"),
    "return_drafts": flag,
    "n": partial(whole, least=1, most=MAX_N, allowed=f"1 to {MAX_N}, a whole number"),
    "cache_prefix": flag,
    "logits_processor": _unless_made(processors),
    "prefix_allowed_tokens_fn": _unless_made(prefix_function),
    "stopping_criteria": _unless_made(criteria),
    "grammar": lambda name, given: given if hasattr(given, "error_at") else grammar(name, given),
    "logprobs": _LOGPROBS,
    "logprobs_mode": partial(choice, allowed=("raw", "processed")),
    "prompt_logprobs": _unless_made(_LOGPROBS),
    "prompt_logprobs_start": partial(whole, least=0, most=None, allowed="0 or more, a whole number"),
    "return_logits": _unless_made(flag),
    "return_scores": _unless_made(flag),
    "max_time": number("None or seconds, 0 or more", lambda x: x >= 0),
    "strict_length": flag,
}
"""How the value of each option is read; those of `LogitsOptions` have their own."""


@dataclass(frozen=True)
class SamplingArrays(SamplingParameters[np.ndarray]):
    """Sampling parameters of several rows, [B] each."""

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> SamplingArrays:
        """Collect the parameters of several rows."""
        rows = list(params)
        return cls(*(np.array([getattr(one, name) for one in rows], dtype_of(cls, name)) for name in array_names(cls)))

    def rows(self, index: np.ndarray | slice) -> SamplingArrays:
        """The parameters of selected rows."""
        return SamplingArrays(*(column[index] for column in self.columns))

    @property
    def any_sampled(self) -> bool:
        """Whether any row is not greedy."""
        return bool((self.temperature > 0).any())

    @property
    def filters(self) -> bool:
        """Whether any row restricts its support."""
        return bool((self.top_k > 0).any() or (self.top_p < 1).any() or (self.min_p > 0).any())


@dataclass(frozen=True, kw_only=True)
class SamplingTensors(SamplingParameters[Tensor]):
    """SamplingArrays on the device, [R] each, for R rows of logits; `filters` as known on the host."""

    filters: bool

    def first(self, count: int) -> SamplingTensors:
        """Views of the parameters of the first rows."""
        return SamplingTensors(*(column[:count] for column in self.columns), filters=self.filters)

    def rows(self, index: Tensor) -> SamplingTensors:
        """The parameters of selected rows ([n] int64)."""
        return SamplingTensors(*(column.index_select(0, index) for column in self.columns), filters=self.filters)
