"""Arguments of `generate` and `stream`: options by name, also by those of transformers, vLLM and OpenAI.

What means the same here is served; what does not is refused with the call that does it. `SamplingParams` refuses
unknown names in the same words.

Source: transformers.GenerationMixin.generate and GenerationConfig; vllm.SamplingParams and vllm.LLM.generate; OpenAI's
API reference, "Create chat completion".
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from typing import Any, TypeVar

from transformers import GenerationConfig

from specdec.errors import InvalidInputError
from specdec.options.generation_config import is_off
from specdec.options.load_options import other_names
from specdec.options.logits_options import OFF
from specdec.values import Options, only, only_known, short, unknown, without

_OTHER_NAMES = other_names("sampling")
"""Options of `SamplingParams` that other projects have under another name."""
_IN_BODIES = {**_OTHER_NAMES, "response_format": "grammar"}
"""The same of the options of a body or a row."""
_OF_CALLS = {"use_tqdm": "progress", "apply_chat_template": "chat"}
"""The same of options that a call has beside those."""
RIGHT_CALLS = other_names("right_calls")
"""What to do instead, by arguments that calls of other projects have."""
FIRST = RIGHT_CALLS["prompt"]
_SAME_MEANING = {"num_return_sequences": "n", "stop_strings": "stop"}

CHAT_OPTIONS = (
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *("tools", "documents", "chat_template", "split_special_tokens"),
)
"""Options of a call, or of a body, that belong to the chat template. Source: transformers, `apply_chat_template` (its
`sanitize_control_tokens` has the name of the tokenizers' option here); vLLM, "Chat API", extra parameters."""
K = TypeVar("K", bound=type)


def unexpected(
    call: str, given: Options, known: Collection[str], what: str = "unexpected keyword argument"
) -> InvalidInputError:
    """The error for options that there are not, with the right call for the first.

    Args:
        call: what options stand in, as "SamplingParams({})". given: options that are unknown. known: names that exist.
        what: the given ones are, in words.
    """
    name, value = next(iter(given.items()))
    names = _OTHER_NAMES | (_OF_CALLS if "progress" in known else {})
    hint = RIGHT_CALLS.get(name, "")
    if name in names:
        own = names[name]
        hint = f"it is called {own} here: {call.format(f'{own}={short(value)}')}"
    return unknown(what, given, sorted(known, key=OFF.__contains__), hint)  # those that change logits last


def only_known_fields(kind: K) -> K:
    """A decorator of a dataclass: unknown keyword arguments raise the InvalidInputError of `unexpected`."""
    made: Any = kind
    made.__init__ = only_known(made.__init__, partial(unexpected, f"{kind.__name__}({{}})"))
    return kind


def own_names(options: Options) -> Options:
    """Options of a body or a row by their names here. Raises InvalidInputError: one is given two values."""
    found = Options()
    names = dict[str, str]()
    for name, value in options.items():
        own = _IN_BODIES.get(name, name)
        if own in found and found[own] != value:
            both = f"{names[own]}={short(found[own])} and {name}={short(value)}"
            raise InvalidInputError(f"{both} are both {own}, and differ; give one of them")
        found[own] = value
        names[own] = name
    return found


def params_of_call(params: Any, options: Options) -> Any:
    """The parameters of a call; where they stand among its options they are taken out of these.

    With do_sample, which transformers alone has, the call is read as transformers reads it.

    Raises:
        InvalidInputError: parameters that are given twice.
    """
    for name in ("sampling_params", "generation_config"):
        params = given_once("params", params, name, options)
    for name, own in _SAME_MEANING.items():
        if options.get(name) is not None and options.get(own) is None:
            options[own] = options.pop(name)
    return GenerationConfig() if params is None and options.get("do_sample") is not None else params


def given_once(what: str, given: Any, name: str, options: Options) -> Any:
    """What is given as `given`, or among the options, out of which it is taken. Raises InvalidInputError: as both."""
    other = options.pop(name, None)
    if given is not None and other is not None:
        raise InvalidInputError(f"{what} and {name}= were both given, and mean the same: give one of them")
    return given if other is None else other


def with_options(
    config: GenerationConfig, options: Options, known: Collection[str]
) -> tuple[GenerationConfig, Options]:
    """A GenerationConfig with its fields among the options of a call, and those that are fields of SamplingParams
    alone. A temperature without do_sample makes it sample or not.

    known: names of the fields of SamplingParams. Raises InvalidInputError: an option that there is not.
    """
    names = {name for name in options if name in vars(config) and not name.startswith("_")}
    rest = known_options(without(options, names), known)
    config = copy.deepcopy(config) if names else config
    for name in names:
        setattr(config, name, options[name])
    if config.do_sample is None and "temperature" in names:
        config.do_sample = options["temperature"] != 0
    return config, rest


def known_options(options: Options, known: Collection[str]) -> Options:
    """Those of a call's options that are fields of SamplingParams; others may change nothing. Raises InvalidInputError:
    an option that there is not."""
    rest = {name: value for name, value in options.items() if name not in known and not _changes_nothing(name, value)}
    if rest:
        raise unexpected("generate(prompts, {})", rest, (*known, "chat", *CHAT_OPTIONS, "progress"))
    return only(options, known)


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether an option of another project does nothing: unset, or a field of a GenerationConfig that is off."""
    if value is None:
        return name in _OTHER_NAMES or name in RIGHT_CALLS or name in vars(GenerationConfig())
    return name != "do_sample" and is_off(name, value)
