"""A call's prompts and parameters -> requests, checked before anything is started.

Score: log-probabilities of given completions, which requests of their own read as prompts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from transformers import GenerationConfig

from specdec.errors import InvalidInputError
from specdec.options.arguments import CHAT_OPTIONS, known_options, params_of_call, unexpected, with_options
from specdec.options.generation_config import eos_ids, own_fields, sampling_fields
from specdec.options.load_options import Use
from specdec.requests.chats import prompts_in
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.prompts import Prompts, encode_prompts, prompts_of_call
from specdec.requests.request import Ended
from specdec.requests.sampling import SamplingParams
from specdec.values import Options, TokenIds, listed, short

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Params = SamplingParams | GenerationConfig | Sequence[SamplingParams | GenerationConfig] | None
Check = Callable[[], None] | None
"""The rest of a check that a call's first round leaves for later, see `LiveModel.begin_check`."""
_AtLength = Callable[[int], SamplingParams]
_ONE = (SamplingParams, GenerationConfig, NoneType)
_FIELDS = tuple(f.name for f in fields(SamplingParams))
_KINDS = "SamplingParams or a transformers.GenerationConfig, one for all prompts or a list with one per prompt"


@dataclass(frozen=True)
class Submission:
    """One request, ready for `Engine.submit`: prompt ids, parameters, which sample of its prompt, its eos ids."""

    token_ids: list[int]
    params: SamplingParams
    sample_index: int
    eos_token_ids: TokenIds

    def submit_to(self, engine: Any) -> int:
        """Queue it in an `Engine`; the request's id. Raises as `Engine.submit`."""
        return engine.submit(self.token_ids, self.params, self.sample_index, self.eos_token_ids)


S = TypeVar("S", bound=Submission)


class Submits(Protocol):
    """Whatever queues one request, such as a `Submission`."""

    def submit_to(self, engine: Any) -> int:
        """Queue a request in an `Engine`; its id."""


def submissions(
    prompts: Prompts,
    params: Params,
    model: PreTrainedModel,
    tokenizer: Any,
    use: Use,
    options: Options | None = None,
    most: int | None = None,
) -> list[Submission]:
    """The requests of one call: `n` in a row of every prompt, in order.

    Args:
        use: whether the model's own generation_config applies. Its current eos ids always do.
        options: keyword arguments of the call: see `specdec.options.arguments`. most: tokens of a request.

    Raises:
        InvalidInputError: a bad prompt, bad parameters, or a model's generation_config that cannot be honoured.
    """
    left = dict(options or {})
    prompts = prompts_of_call(prompts, left)
    params = params_of_call(params, left)
    _check_token_types(prompts, model)
    ids = encode_prompts(prompts, tokenizer, most)
    several = isinstance(params, (list, tuple))
    each = listed(params)
    if odd := [one for one in each if not isinstance(one, _ONE)][:1]:
        hint = "; SamplingParams.from_dict reads a dict" if isinstance(odd[0], dict) else ""
        raise InvalidInputError(f"params{' has ' if several else '='}{short(odd[0])}: allowed is {_KINDS}{hint}")
    if several and len(each) != len(ids):
        raise InvalidInputError(f"{len(each)} SamplingParams for {len(ids)} prompts; give one, or one per prompt")
    at = [_reader(model, use, left, one) for one in each]  # parameters for all are read once
    found: list[Submission] = []
    for prompt, params_at in zip(ids, at if several else at * len(ids), strict=True):
        own = params_at(len(prompt))
        eos = eos_ids(model.generation_config)
        for i in range(own.n):
            if i == 1 and own.prompt_logprobs is not None:  # the first sample tells those of the prompt
                own = replace(own, prompt_logprobs=None)
            found.append(Submission(prompt, own.of_request(len(found), model.device), i, eos))
    return found


def check_each(requests: Sequence[S], check: Callable[[S], object]) -> None:
    """Check the requests of one call, each prompt's once: its samples are alike.

    Raises:
        InvalidInputError: raised by `check`; names the prompt if there are several.
    """
    one_each = [request for request in requests if not request.sample_index]
    for i, request in enumerate(one_each):
        try:
            check(request)
        except InvalidInputError as error:
            if len(one_each) == 1:
                raise
            raise type(error)(f"prompt {i}: {error}") from None


def _check_token_types(prompts: Prompts, model: PreTrainedModel) -> None:
    """Refuse token types beside a prompt's ids that this model reads: of images, or of a second text.

    For other models they mean nothing, and 0 is text; some tokenizers give them out of habit.
    """
    for prompt in prompts_in(prompts) or (prompts,):
        types = prompt.get("token_type_ids") if isinstance(prompt, Mapping) else None
        if types is None or "token_type_ids" not in signature(model.forward).parameters:
            continue
        if torch.as_tensor(types).any():
            raise InvalidInputError(
                f"token_type_ids beside the prompt's ids are not all 0, and {type(model).__name__} reads them (images, "
                "or a second text); only text of type 0 is served"
            )


def from_generation_config(
    config: GenerationConfig, model: PreTrainedModel, prompt_len: int, use: Use = "model"
) -> SamplingParams:
    """The sampling parameters that transformers' own `generate` would use, see `sampling_fields`.

    Raises:
        InvalidInputError: the config needs something that is not supported, or has values of a wrong type.
    """
    return SamplingParams(**sampling_fields(config, model, prompt_len, use))


def filled(params: SamplingParams, model: Any) -> SamplingParams:
    """For commands with defaults of their own: what is None, as the generation_config of a SpeculativeModel has it.

    Raises:
        InvalidInputError: as `own_fields`.
    """
    own = own_fields(model.hf_model, model.generation_config_use)
    return replace(params, **{name: value for name, value in own.items() if getattr(params, name) is None})


def _reader(model: PreTrainedModel, use: Use, options: Options, given: Any) -> _AtLength:
    """Given parameters with the options of the call, at the length of a prompt. None: options alone, which replace what
    the model's own generation_config has."""
    if isinstance(given, GenerationConfig):
        config, rest = with_options(given, options, _FIELDS)
        return lambda length: replace(from_generation_config(config, model, length, use), **rest)
    named = known_options(options, _FIELDS)
    if given is None:
        own = own_fields(model, use)
        own |= {name: value for name, value in named.items() if value is not None or name not in own}
    else:
        own = {name: getattr(given, name) for name in _FIELDS} | named
    is_checked = type(given) is SamplingParams and not named  # a subclass may have skipped the checks
    found = given if is_checked else SamplingParams(**own)
    return lambda length: found


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


_DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p")


def to_be_scored(
    prompts: Prompts,
    completions: Prompts,
    logprobs: int,
    tokenizer: Any,
    device: torch.device,
    options: Options | None = None,
) -> list[Submission]:
    """A request for each pair: it reads all tokens but the last, which it is then made to generate.

    options: keyword arguments of the call that belong to its prompts; or of the distribution (`_DISTRIBUTION`), after
    which the request reads all tokens, and generates one that nobody needs.

    Raises:
        InvalidInputError: a bad prompt or completion, an empty one, not as many of both, an unknown option.
    """
    left = dict(options or {})
    prompts = prompts_of_call(prompts, left)
    drawn = {name: left.pop(name) for name in _DISTRIBUTION if name in left}
    if left:
        raise unexpected("score(prompts, completions, {})", left, ("chat", *CHAT_OPTIONS, "logprobs", *_DISTRIBUTION))
    before = encode_prompts(prompts, tokenizer)
    # As prompts are, but a text gets no special tokens: it goes on after its prompt.
    try:
        after = encode_prompts(completions, partial(tokenizer, add_special_tokens=False))
    except InvalidInputError as error:
        raise InvalidInputError(f"completions are given as prompts are: {error}") from None
    if not all(after):
        raise InvalidInputError(f"completion {after.index([])} is empty; each has one token at least")
    if len(before) == 1:
        before *= len(after)
    if len(before) != len(after):
        raise InvalidInputError(f"{len(after)} completions for {len(before)} prompts: give one prompt, or as many")
    found = list[Submission]()
    for prompt, own in zip(before, after, strict=True):
        params = SamplingParams(
            max_new_tokens=1,
            ignore_eos=True,
            num_speculative_tokens=0,
            prompt_logprobs=logprobs if drawn or len(own) > 1 else None,
            prompt_logprobs_start=len(prompt),
            logprobs_mode="processed" if drawn else "raw",
            **drawn or {"allowed_token_ids": (own[-1],), "logprobs": logprobs},
        )
        read = prompt + (own if drawn else own[:-1])
        found.append(Submission(read, params.of_request(len(found), device), 0, ()))
    return found


def scores(done: Iterable[Ended]) -> list[Score]:
    """Of requests of `to_be_scored`, in their order. done: (place, Completion) of each."""
    found = []
    for _, completion in sorted(done, key=lambda each: each[0]):
        of_prompt = [each for each in completion.prompt_logprobs or () if each is not None]
        logprobs = (*of_prompt, *(completion.logprobs or ()))
        found.append(Score(sum(each.logprob for each in logprobs), logprobs))
    return found
