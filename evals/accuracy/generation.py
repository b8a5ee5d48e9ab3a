"""How a task's requests are generated: its gen_kwargs, and thinking, read as lm-eval's own `hf` model reads them.

Source: EleutherAI/lm-evaluation-harness lm_eval/models/huggingface.py (`generate_until`, `_model_generate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.models.utils import (
    handle_stop_sequences,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from transformers import GenerationConfig

from evals.runs.answers import Turn
from specdec.errors import InvalidInputError
from specdec.options.generation_config import how_served
from specdec.options.logits_options import OFF
from specdec.requests.sampling import SamplingParams
from specdec.requests.submission import from_generation_config
from specdec.values import Options

_LENGTHS = frozenset({"max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"})
_NOT_HERE = frozenset({"max_length", "num_return_sequences"})


_OF_TRANSFORMERS = {
    name for name in vars(GenerationConfig()) if not name.startswith("_") and how_served(name) != "refused"
} - _NOT_HERE
"""Fields of GenerationConfig that are honoured, or change nothing."""


@dataclass(frozen=True)
class Generation:
    """How the requests of one set of gen_kwargs are generated.

    Attributes:
        params: sampling of each; the seed is each request's own.
        until: strings that end an answer and are cut from it; the tokenizer's end token is one.
        seed: of the gen_kwargs, or None for the run's.
        longest: most tokens of prompt and answer together.
    """

    params: SamplingParams
    until: tuple[str, ...]
    seed: int | None
    longest: int

    @classmethod
    def of(cls, gen_kwargs: Options, model: Any, default_length: int) -> Generation:
        """Read gen_kwargs. Unset fields come from the model's generation_config, then from transformers' defaults.

        Args:
            model: a SpeculativeModel with a tokenizer. default_length: new tokens where gen_kwargs give no number.

        Raises:
            InvalidInputError: an argument that this model does not have, which would change results; sampling at
                temperature 0; or no room for a prompt.
        """
        eos = model.tokenizer.eos_token_id
        asked: Options = dict(normalize_gen_kwargs(dict(gen_kwargs), default_length))
        until = handle_stop_sequences(asked.pop("until"), None if eos is None else model.tokenizer.decode([eos]))
        length = asked.pop("max_gen_toks")
        seed = asked.pop("seed", None)
        if "max_length" in asked:
            raise InvalidInputError(
                f"max_length={asked['max_length']} in gen_kwargs counts the prompt and its padding; give max_gen_toks"
            )
        known = _OF_TRANSFORMERS | set(OFF)
        unknown = sorted(set(asked) - known)
        if unknown:
            listed = sorted((known - {"max_new_tokens"}) | _LENGTHS | {"until", "seed"})
            raise InvalidInputError(f"generation arguments not supported: {unknown}; known are {listed}")
        if length >= model.config.max_model_len:  # lm-eval would cut the whole prompt off
            raise InvalidInputError(
                f"the task generates up to {length:,} tokens, which leaves no room for a prompt in max_model_len="
                f"{model.config.max_model_len:,}; raise max_model_len (--max-model-len) to {length:,} and a prompt's "
                "length"
            )
        # No sampling at temperature 0, as in transformers; greedy decoding has no temperature.
        if not asked["do_sample"]:
            asked.pop("temperature", None)
        elif not float(asked.get("temperature", 0.0)):
            why = "temperature=0" if "temperature" in gen_kwargs else "no temperature, which lm-eval takes for 0"
            raise InvalidInputError(
                f"do_sample=True with {why}: give a temperature above 0 (--gen_kwargs do_sample=true,temperature=1.0), "
                "or do_sample=False for greedy decoding"
            )
        ours = {name: asked.pop(name) for name in set(OFF) - _OF_TRANSFORMERS if name in asked}
        config = GenerationConfig(**asked, max_new_tokens=length, num_return_sequences=1)
        read = from_generation_config(config, model.hf_model, 0, model.generation_config_use)
        stop = tuple(dict.fromkeys((*read.stop, *(each for each in until if each))))
        return cls(replace(read, stop=stop, **ours), tuple(until), seed, model.config.max_model_len)

    def fitting(self, prompt: list[int]) -> list[int]:
        """The prompt's last tokens that leave room for the answer."""
        return maybe_truncate(prompt, self.params.max_new_tokens, self.longest, side="left")[0]

    def answer(self, text: str) -> str:
        """The text that lm-eval judges: up to the first stop string."""
        return postprocess_generated_text(text, list(self.until), None)


@dataclass(frozen=True)
class Thinking:
    """What a model thinks before its answer.

    Attributes:
        enabled: passed to the chat template: whether the model may think; None: the template's default.
        end: the text, or the id of the token, that ends thinking; None: everything is the answer.
        template_args: arguments of the chat template.
    """

    enabled: bool | None
    end: str | int | None
    template_args: Options

    @classmethod
    def of(cls, enabled: bool | None, end: str | int | None, template_args: Options | None) -> Thinking:
        """Read lm-eval's enable_thinking, think_end_token and chat_template_args.

        Raises:
            InvalidInputError: it thinks, and nothing tells where that ends; or template_args are no mapping.
        """
        if enabled and end is None:
            raise InvalidInputError(
                "enable_thinking=True without think_end_token: give the text or the id of the token that ends "
                'thinking, such as think_end_token="</think>"; what stands before it is not scored'
            )
        given = {} if template_args is None else template_args
        if not isinstance(given, Mapping):
            raise InvalidInputError(
                f'chat_template_args={given!r}: give a mapping, such as {{"enable_thinking": false}}'
            )
        own = {} if enabled is None else {"enable_thinking": enabled}
        return cls(enabled, int(end) if isinstance(end, str) and end.isdigit() else end, {**given, **own})

    def left_out(self, turn: Turn, tokenizer: Any) -> str:
        """The text after the last end of thinking."""
        if self.end is None:
            return turn.text
        if isinstance(self.end, str):
            return turn.text.split(self.end)[-1].lstrip()
        places = [i for i, token in enumerate(turn.token_ids) if token == self.end]
        text = (
            tokenizer.decode(list(turn.token_ids[places[-1] + 1 :]), skip_special_tokens=True) if places else turn.text
        )
        return str(text).lstrip()
