"""Asked: one call of transformers' `generate`, as SamplingParams, and its answer as transformers gives it.

Source: huggingface/transformers, generation/utils.py: `generate` (which arguments are prepared how), `_sample` (what is
returned, and what a streamer gets).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.engine.streams import Stream, StreamUpdate, collected
from specdec.errors import InvalidInputError, SpecdecError
from specdec.model import SpeculativeModel
from specdec.options.generation_config import eos_ids, sampling_fields
from specdec.requests.request import Completion, Ended
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import STATELESS, RowWise, overlapping
from specdec.user_warnings import warn_user
from specdec.values import Options

_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
_FALL_BACK = "attach(…, fallback=True), which runs such calls as transformers does"
WAY_OUT = f"leave it out, or {_FALL_BACK}"
_UNREAD = {"use_cache", "logits_to_keep", "return_dict"}
CACHES = {"past_key_values", "cache", "cache_params"}
PREPARED = {"position_ids", "cache_position", *CACHES}
"""Arguments of the model that transformers prepares for its own loop: rounds have theirs."""
_OF_PROMPTS = (
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
)
"""transformers' processors that hold a prompt of each row."""
_BY_ROW = STATELESS | {
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
}


@dataclass(frozen=True)
class Asked:
    """The parameters of a call, prepared as transformers prepares them.

    Attributes:
        ids: [B, L] int64, padded. mask: [B, L], 0 where padding is.
        config: every field resolved, lengths counted with the padding; `max_length` holds.
        processors, criteria, prefix_function: the caller's own. streamer, tokenizer (for stop strings): or None.
    """

    ids: Tensor
    mask: Tensor
    config: GenerationConfig
    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    prefix_function: Any = None
    streamer: Any = None
    tokenizer: Any = None

    @property
    def outputs(self) -> frozenset[str]:
        """The requested ones of `_OUTPUTS`; scores and logits are only given in a dict, as in transformers."""
        asked = {name for name in _OUTPUTS if getattr(self.config, name, None)}
        return frozenset(asked) if "return_dict_in_generate" in asked else frozenset()

    def started(self, model: SpeculativeModel) -> RunningCall:
        """Its requests, after their first round. Whatever stands against the call is found here.

        Sampled rows get seeds from torch's generator, so that `torch.manual_seed` repeats a call; the generator of a
        call that is refused is as it was.

        Raises:
            InvalidInputError: an option, named, that rounds apply in another way than transformers. ModelChangedError,
                QueueFullError and their like: as `SpeculativeModel.stream`. ValueError: as transformers.
        """
        generator = torch.get_rng_state()
        try:
            self.check(model.hf_model)
            rows = [ids[mask != 0].tolist() for ids, mask in zip(self.ids.cpu(), self.mask.cpu(), strict=True)]
            prompts = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
            stream = model.stream(prompts, self.params(model.hf_model))
            return RunningCall(self, stream, next(stream))  # rounds from graphs find a changed model in their first
        except SpecdecError:
            torch.set_rng_state(generator)
            raise

    @property
    def _samples(self) -> int:
        return self.config.num_return_sequences or 1

    def check(self, model: PreTrainedModel) -> None:
        """Refuse what would come out otherwise than in transformers. Raises InvalidInputError."""
        shapes = (tuple(self.ids.shape), tuple(self.mask.shape))
        several = len(self.ids) * self._samples
        if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
            raise InvalidInputError(f"input_ids {shapes[0]}, attention_mask {shapes[1]}: both are [B, L]; {WAY_OUT}")
        if (self.mask[:, 1:] < self.mask[:, :-1]).any():
            raise InvalidInputError(
                "attention_mask has a 0 after a 1: only padding on the left is served (transformers continues a row "
                f'after its last place, padding or not); set tokenizer.padding_side="left", or {_FALL_BACK}'
            )
        if has_adapter_for_each_row(model):
            raise InvalidInputError(f"peft's adapter_names: rounds have one adapter for all rows; {WAY_OUT}")
        if torch.is_autocast_enabled(model.device.type):
            raise InvalidInputError(
                f"torch.autocast is on, and rounds run without it; leave its block, or {_FALL_BACK}"
            )
        if self.streamer is not None and several > 1:
            raise InvalidInputError(f"a streamer takes one sequence, not {several}; {WAY_OUT}")
        odd = [type(one).__name__ for one in self.processors + self.criteria if not self._is_by_row(one)]
        if odd and several > 1:
            raise InvalidInputError(
                f"{', '.join(odd)}: this code may read all {several} sequences of the call at once, and is shown one, "
                "[1, L]; if it treats each row by that row alone, pass specdec.row_wise(it); otherwise generate one "
                f"sequence a call, or {_FALL_BACK}"
            )

    def _is_by_row(self, code: Any) -> bool:
        if type(code) in _OF_PROMPTS:
            return self._samples == 1 and len(_prompts_of(code)) == len(self.ids)
        return isinstance(code, RowWise) or type(code) in _BY_ROW

    def params(self, model: PreTrainedModel) -> list[SamplingParams]:
        """One for each row. Raises InvalidInputError: an option, named, that this library does not have."""
        length = self.ids.shape[1]
        config = self._config()
        found = sampling_fields(config, model, length, "ignore")  # the model's own is in it, or was switched off
        if config.eos_token_id is None:
            found["ignore_eos"] = True
        if found["max_new_tokens"] < 1:
            raise InvalidInputError(f"max_length={config.max_length} leaves no room after {length} tokens")
        for kind, option in overlapping(self.processors, found):
            warn_user(f"the logits processor {kind.__name__} is used in place of the option {option}")
            del found[option]
        base = SamplingParams(
            **found,
            strict_length=True,
            return_logits="output_logits" in self.outputs,
            return_scores="output_scores" in self.outputs,
        )
        criteria = self._stop_strings() + self.criteria
        seeds = [None] * len(self.ids)
        if not base.greedy:
            seeds = torch.randint(0, 2**62, (len(self.ids),), device="cpu").tolist()
        return [replace(base, seed=seed, **self._code(row, criteria)) for row, seed in enumerate(seeds)]

    def _code(self, row: int, criteria: tuple[Any, ...]) -> Options:
        """The caller's own for a row, which sees its padding, too."""
        processors = tuple(_of_row(one, row) for one in self.processors)
        function = self.prefix_function
        if not self.mask[row].all():
            seen = partial(_Padded, self.ids[row : row + 1], int(self.mask[row].sum()))
            processors = tuple(map(seen, processors))
            criteria = tuple(map(seen, criteria))
            function = None if function is None else seen(function)
        return {
            "logits_processor": processors or None,
            "prefix_allowed_tokens_fn": function,
            "stopping_criteria": criteria or None,
        }

    def _config(self) -> GenerationConfig:
        """What is left for SamplingParams: how much is new, counted without the padded prompt."""
        known = vars(GenerationConfig())
        given = vars(self.config).items()
        config = GenerationConfig(**{name: v for name, v in given if not name.startswith("_") and name in known})
        length = self.ids.shape[1]
        least = max((config.min_length or 0) - length, config.min_new_tokens or 0)
        config.max_new_tokens, config.max_length = (config.max_length or 0) - length, None
        config.min_new_tokens = least or None
        config.min_length = None
        config.eos_token_id = [token for token in eos_ids(self.config) if token >= 0] or None
        for name in ("stop_strings", "bos_token_id", "pad_token_id", *_OUTPUTS):
            setattr(config, name, None)
        return config

    def _stop_strings(self) -> tuple[Any, ...]:
        """transformers' own criterion, which also sees the prompt's end. Raises ValueError without a tokenizer."""
        stops = self.config.stop_strings
        if not stops:
            return ()
        if self.tokenizer is None:
            raise ValueError(
                "there are stop strings, in the arguments to `generate` or in the model's generation config, and no "
                "tokenizer: pass the model's tokenizer to the `tokenizer` argument of `generate`"
            )
        criterion = stopping_criteria.StopStringCriteria(stop_strings=stops, tokenizer=self.tokenizer)
        # A function, which is not copied for each request: it has no state.
        return (lambda ids, scores: criterion(ids, scores),)

    def result(self, done: Sequence[Completion]) -> Tensor | Any:
        """[B·n, L + new] int64 on the inputs' device, or transformers' output class."""
        device = self.ids.device
        new = [torch.tensor(each.token_ids, dtype=torch.int64) for each in done]
        tokens = pad_sequence(new, batch_first=True, padding_value=self.pad).to(device)
        sequences = torch.cat([self.ids.repeat_interleave(self._samples, dim=0), tokens], 1)
        if not self.outputs:
            return sequences
        most = tokens.shape[1]
        logits = _steps([each.logits for each in done], most, device)
        scores = _steps([each.scores for each in done], most, device)
        given: Options = {"sequences": sequences, "scores": scores, "logits": logits}
        return GenerateDecoderOnlyOutput(**given)

    @property
    def pad(self) -> int:
        """What stands after the end of a shorter row."""
        pad = self.config.pad_token_id
        return int(pad) if pad is not None else next(iter(eos_ids(self.config)), 0)


@dataclass(frozen=True)
class RunningCall:
    """A call whose requests run. first: what their first round has brought."""

    asked: Asked
    stream: Stream
    first: StreamUpdate

    def result(self) -> Tensor | Any:
        """Generate to the end: see `Asked.result`."""
        return self.asked.result(collected(self._completed()))

    def _completed(self) -> Iterator[Ended]:
        """Each completion with its place; the streamer gets the prompt, then every token."""
        streamer = self.asked.streamer
        with self.stream:  # also where the streamer raises
            if streamer is not None:
                streamer.put(self.asked.ids.cpu())
            for update in chain((self.first,), self.stream):
                for token in () if streamer is None else update.token_ids:
                    streamer.put(torch.tensor([token]))
                if update.completion is not None:
                    yield update.index, update.completion
            if streamer is not None:
                streamer.end()


def _prompts_of(code: Any) -> Sequence[Any]:
    """A prompt, or what was found in it, of each row."""
    return vars(code).get("generated_ngrams", vars(code).get("encoder_input_ids", ()))


def _of_row(code: Any, row: int) -> Any:
    """A processor that sees one row alone."""
    if type(code) not in _OF_PROMPTS or len(_prompts_of(code)) == 1:
        return code
    own = copy.copy(code)
    for name in ("generated_ngrams", "encoder_input_ids"):
        if name in vars(own):
            setattr(own, name, vars(own)[name][row : row + 1])
    if hasattr(own, "batch_size"):
        own.batch_size = 1
    return own


def has_adapter_for_each_row(model: PreTrainedModel) -> bool:
    """Whether a call of peft's with `adapter_names` runs, which gives the model hooks for its own batch."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return any(isinstance(hook, partial) and {"adapter_names", "alora_offsets"} & {*hook.keywords} for hook in hooks)


def check_arguments(model_arguments: Options, prepared: Collection[str] = ()) -> None:
    """Raises InvalidInputError: arguments of the model's forward that rounds do not pass on.

    prepared: those that are not the caller's.
    """
    known = {*_UNREAD, *prepared}
    odd = [name for name, given in model_arguments.items() if name not in known and _says_something(name, given)]
    if odd:
        raise InvalidInputError(
            f"{', '.join(sorted(odd))}: only token ids and their attention_mask are read, and only tokens, scores and "
            f"logits given back; {WAY_OUT}"
        )


def _says_something(name: str, given: Any) -> bool:
    if name == "token_type_ids" and isinstance(given, Tensor):
        return bool(given.any())
    return given is not None and given is not False


def _steps(rows: Sequence[np.ndarray | None], most: int, device: torch.device) -> tuple[Tensor, ...] | None:
    """[B·n, V] of each new token, 0 of sequences that have ended; None where not requested."""
    found = [each for each in rows if each is not None]
    if not found:
        return None
    whole = torch.zeros(most, len(found), max(each.shape[1] for each in found))
    for i, each in enumerate(found):
        whole[: len(each), i] = torch.from_numpy(each)
    return tuple(whole.to(device))


@dataclass(frozen=True, eq=False)
class _Padded:
    """The caller's code of a row that has padding: it sees the row as it was given, then the new tokens.

    row: [1, L] with padding. length: tokens without.
    """

    row: Tensor
    length: int
    inner: Any

    def __call__(self, first: Any, second: Any) -> Any:
        if isinstance(first, int):  # a prefix_allowed_tokens_fn: (batch id, tokens [L])
            return self.inner(first, self._whole(second[None])[0])
        return self.inner(self._whole(first), second)

    def _whole(self, ids: Tensor) -> Tensor:
        return torch.cat([self.row.to(ids.device), ids[:, self.length :]], 1)
