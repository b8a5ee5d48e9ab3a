"""gen_kwargs as lm-eval's `hf` reads them, and thinking that is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from transformers import GenerationConfig

from evals.accuracy.generation import Generation, Thinking
from evals.runs.answers import Turn
from specdec.errors import InvalidInputError


def model(**own: Any) -> Any:
    """A model that has only what gen_kwargs are read beside: a generation_config and an end token."""
    network = torch.nn.Linear(2, 2)
    network.generation_config = GenerationConfig(eos_token_id=7, **own)
    tokenizer = SimpleNamespace(eos_token_id=7, decode=lambda ids: "<end>" * len(ids))
    config = SimpleNamespace(max_model_len=100)
    return SimpleNamespace(hf_model=network, generation_config_use="model", tokenizer=tokenizer, config=config)


def read(own: dict[str, Any] | None = None, **gen_kwargs: Any) -> Generation:
    return Generation.of(gen_kwargs, model(**(own or {})), 16)


def test_sampling_has_transformers_top_k_and_the_checkpoint_s_own_settings() -> None:
    own = {"top_p": 0.8, "repetition_penalty": 1.1, "temperature": 0.3, "do_sample": True}
    plain, ruled = read(temperature=0.5).params, read(own, do_sample=True, temperature=0.5, top_k=9).params
    assert (plain.temperature, plain.top_k, plain.top_p) == (0.5, 50, 1.0)
    assert (ruled.temperature, ruled.top_k, ruled.top_p, ruled.repetition_penalty) == (0.5, 9, 0.8, 1.1)
    greedy = read(own, do_sample=False, temperature=0.9).params
    assert greedy.greedy and greedy.repetition_penalty == 1.1
    assert read(own).params.greedy  # neither is given: as in lm-eval, whatever the checkpoint has


def test_penalties_of_transformers_and_of_openai_are_taken() -> None:
    params = read(repetition_penalty=1.3, presence_penalty=0.5, seed=4)
    assert (params.params.repetition_penalty, params.params.presence_penalty, params.seed) == (1.3, 0.5, 4)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 0}, {}])
def test_sampling_at_temperature_0_is_an_error_that_says_what_to_give(given: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidInputError, match=r"do_sample=True with .*do_sample=true,temperature=1.0\), or do_sample=F"
    ):
        read(do_sample=True, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_length": 30}, "max_length=30 in gen_kwargs .*; give max_gen_toks"),
        ({"num_return_sequences": 2}, r"not supported: \['num_return_sequences'\]; known are .*'until'"),
        ({"num_beams": 2}, r"not supported: \['num_beams'\]"),
        ({"max_tokens": 100}, "leaves no room for a prompt in max_model_len=100"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        read(**given)


def test_names_of_the_length_and_what_is_left_of_a_long_prompt() -> None:
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    for first in range(4):
        assert read(**{name: 20 + i for i, name in enumerate(names) if i >= first}).params.max_new_tokens == 20 + first
    assert read().params.max_new_tokens == 16
    assert read(max_tokens=97).fitting([1, 2, 3, 4, 5]) == [3, 4, 5]


def test_the_end_token_is_a_stop_string() -> None:
    found = read(until=["Q:", ""])
    assert found.params.stop == ("Q:", "<end>")
    assert found.answer("It is 4.<end>Q: more") == "It is 4."
    assert read(until="Q:").until == ("Q:", "<end>")


def turn(text: str, ids: tuple[int, ...] = ()) -> Turn:
    return Turn(text, ids, "eos", 1, 1, ())


def test_thinking_is_left_out() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f" {len(ids)} tokens")
    assert Thinking.of(None, None, None).left_out(turn(" a</t> b"), tokenizer) == " a</t> b"
    assert Thinking.of(True, "</t>", None).left_out(turn("a</t> b</t> c"), tokenizer) == "c"
    by_id = Thinking.of(None, "9", None)
    assert by_id.left_out(turn("a b", (1, 9, 2, 9, 3, 4)), tokenizer) == "2 tokens"
    assert by_id.left_out(turn(" a", (1, 2)), tokenizer) == "a"


def test_arguments_of_the_chat_template() -> None:
    assert Thinking.of(False, None, {"enable_thinking": True, "a": 1}).template_args == {
        "enable_thinking": False,
        "a": 1,
    }
    assert Thinking.of(None, None, {"a": 1}).template_args == {"a": 1}
    with pytest.raises(InvalidInputError, match="without think_end_token: give the text or the id"):
        Thinking.of(True, None, None)
    with pytest.raises(InvalidInputError, match="chat_template_args='a=1': give a mapping"):
        Thinking.of(None, None, "a=1")  # type: ignore[arg-type]
