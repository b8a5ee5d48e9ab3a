"""Asked: one call of transformers' `generate`, as SamplingParams, and its answer as transformers gives it.

Source: huggingface/transformers, generation/utils.py: `generate` (which arguments are prepared how), `_sample` (what is
returned, and what a streamer gets).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.engine.streams import Stream, collected, completed
from specdec.errors import InvalidInputError
from specdec.model import SpeculativeModel
from specdec.requests.generation_config import sampling_fields
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import overlapping
from specdec.user_warnings import warn_user

_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
WAY_OUT = "leave it out, or attach(…, fallback=True), which runs such calls as transformers does"
_UNREAD = {"use_cache", "logits_to_keep", "return_dict"}
PREPARED = {"position_ids", "past_key_values", "cache", "cache_position"}
"""Arguments of the model that transformers prepares for its own loop: rounds have theirs."""


@dataclass(frozen=True)
class Asked:
    """What a call asks for, prepared as transformers prepares it.

    Attributes:
        ids: [B, L] int64, padded. mask: [B, L], 0 where padding is.
        config: every field resolved, lengths counted with the padding; `max_length` holds.
        processors, criteria, prefix_function: the caller's own. streamer, tokenizer (for stop strings): or None.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    config: GenerationConfig
    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    prefix_function: Any = None
    streamer: Any = None
    tokenizer: Any = None

    @property
    def outputs(self) -> frozenset[str]:
        """Which of `_OUTPUTS` are asked for; scores and logits are only given in a dict, as in transformers."""
        asked = {name for name in _OUTPUTS if getattr(self.config, name, None)}
        return frozenset(asked) if "return_dict_in_generate" in asked else frozenset()

    def params(self, model: PreTrainedModel) -> list[SamplingParams]:
        """One for each row.

        Sampled rows get seeds from torch's generator, so that `torch.manual_seed` repeats a call.

        Raises:
            InvalidInputError: it asks for what this library does not do, by name.
        """
        length, config = self.ids.shape[1], self._config()
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
            return_logits="output_logits" in self.outputs,
            return_scores="output_scores" in self.outputs,
        )
        criteria = (*self._stop_strings(), *self.criteria)
        seeds = [None] * len(self.ids)
        if not base.greedy:
            seeds = torch.randint(0, 2**62, (len(self.ids),), device="cpu").tolist()
        return [replace(base, seed=seed, **self._code(row, criteria)) for row, seed in enumerate(seeds)]

    def _code(self, row: int, criteria: tuple[Any, ...]) -> dict[str, Any]:
        """The caller's own for a row, which sees its padding, too."""
        processors, function = self.processors, self.prefix_function
        if not self.mask[row].all():
            seen = partial(_Padded, self.ids[row : row + 1], int(self.mask[row].sum()))
            processors, criteria = tuple(map(seen, processors)), tuple(map(seen, criteria))
            function = None if function is None else seen(function)
        return {
            "logits_processor": processors or None,
            "prefix_allowed_tokens_fn": function,
            "stopping_criteria": criteria or None,
        }

    def _config(self) -> GenerationConfig:
        """What is left for SamplingParams: how much is new, counted without the padded prompt."""
        config, length = GenerationConfig(**_public(self.config)), self.ids.shape[1]
        least = max((config.min_length or 0) - length, config.min_new_tokens or 0)
        config.max_new_tokens, config.max_length = (config.max_length or 0) - length, None
        config.min_new_tokens, config.min_length = least or None, None
        config.stop_strings = None
        for name in _OUTPUTS:
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
        return (_Shared(StopStringCriteria(stop_strings=stops, tokenizer=self.tokenizer)),)

    def answer(self, model: SpeculativeModel, params: Sequence[SamplingParams]) -> torch.Tensor | Any:
        """Generate: [B·n, L + new] int64 on the inputs' device, or transformers' output class."""
        pairs = zip(self.ids.tolist(), self.mask.tolist(), strict=True)
        rows = [[token for token, on in zip(*pair, strict=True) if on] for pair in pairs]
        prompts = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        stream, samples = model.stream(prompts, list(params)), params[0].n
        done = collected(completed(stream) if self.streamer is None else self._streamed(stream))
        return self._result(done, samples)

    def _streamed(self, stream: Stream) -> Iterator[tuple[int, Completion]]:
        """The one completion; the streamer gets the prompt, then every token."""
        with closing(stream):  # also where the streamer raises
            if stream.num_requests > 1:
                raise ValueError(f"a streamer takes one sequence, not {stream.num_requests}")
            self.streamer.put(self.ids.cpu())
            for update in stream:
                for token in update.token_ids:
                    self.streamer.put(torch.tensor([token]))
                if update.completion is not None:
                    yield update.index, update.completion
            self.streamer.end()

    def _result(self, done: Sequence[Completion], samples: int) -> torch.Tensor | Any:
        pad, device = self._pad, self.ids.device
        most = max(len(each.token_ids) for each in done)
        new = [[*each.token_ids, *[pad] * (most - len(each.token_ids))] for each in done]
        tokens = torch.tensor(new, dtype=self.ids.dtype, device=device).reshape(len(done), most)
        sequences = torch.cat([self.ids.repeat_interleave(samples, dim=0), tokens], 1)
        if not self.outputs:
            return sequences
        logits = _steps([each.logits for each in done], most, device)
        scores = _steps([each.scores for each in done], most, device)
        given: dict[str, Any] = {"sequences": sequences, "scores": scores, "logits": logits}
        return GenerateDecoderOnlyOutput(**given)

    @property
    def _pad(self) -> int:
        """What stands after the end of a shorter row."""
        pad, eos = self.config.pad_token_id, self.config.eos_token_id
        if pad is None:
            pad = eos[0] if isinstance(eos, (list, tuple)) else eos
        return 0 if pad is None else int(pad)


def check_arguments(model_arguments: Mapping[str, Any], prepared: Collection[str] = ()) -> None:
    """Raises InvalidInputError: arguments of the model's forward that rounds do not pass on.

    prepared: those that are not the caller's.
    """
    known = {*_UNREAD, *prepared}
    odd = [name for name, given in model_arguments.items() if name not in known and _says_something(name, given)]
    if odd:
        raise InvalidInputError(
            f"{', '.join(sorted(odd))}: only token ids and their attention_mask are read; {WAY_OUT}"
        )


def _says_something(name: str, given: Any) -> bool:
    if name == "token_type_ids" and isinstance(given, torch.Tensor):
        return bool(given.any())
    return given is not None and given is not False


def _public(config: GenerationConfig) -> dict[str, Any]:
    known = vars(GenerationConfig())
    return {name: value for name, value in vars(config).items() if not name.startswith("_") and name in known}


def _steps(rows: Sequence[np.ndarray | None], most: int, device: torch.device) -> tuple[torch.Tensor, ...] | None:
    """[B·n, V] of each new token, 0 of sequences that have ended; None where they were not asked for."""
    found = [each for each in rows if each is not None]
    if not found:
        return None
    whole = torch.zeros(most, len(found), max(each.shape[1] for each in found))
    for i, each in enumerate(found):
        whole[: len(each), i] = torch.from_numpy(each)
    return tuple(whole.to(device))


class _Padded:
    """The caller's code of a row that has padding: it sees the row as it was given, then the new tokens."""

    def __init__(self, row: torch.Tensor, length: int, inner: Any) -> None:
        """row: [1, L] with padding. length: tokens without."""
        self._row, self._length, self._inner = row, length, inner

    def __call__(self, first: Any, second: Any) -> Any:
        if isinstance(first, int):  # a prefix_allowed_tokens_fn: (batch id, tokens [L])
            return self._inner(first, self._whole(second[None])[0])
        return self._inner(self._whole(first), second)

    def _whole(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._row.to(ids.device), ids[:, self._length :]], 1)


class _Shared:
    """A criterion without a state, which requests need no copies of."""

    def __init__(self, criterion: Any) -> None:
        self._criterion = criterion

    def __call__(self, ids: torch.Tensor, scores: Any) -> Any:
        return self._criterion(ids, scores)

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self
