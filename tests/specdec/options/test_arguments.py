"""Arguments of a call: by name, also by those of other projects; what is not served names the right call."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from transformers import BatchEncoding, GenerationConfig

from specdec import SamplingParams
from specdec.errors import InvalidInputError

PROMPTS = random_prompts([9, 9])
IDS = torch.tensor(PROMPTS)
RIGHT = [hf_greedy(prompt, 6) for prompt in PROMPTS]


class Chatty(LetterTokenizer):
    """Its chat is the letters of its messages."""

    chat_template = "x"

    def apply_chat_template(self, messages: Any, **_: Any) -> Any:
        return {"input_ids": self("chat " + " ".join(m["content"] for m in messages))["input_ids"]}


@pytest.fixture(scope="module")
def model() -> Any:
    target = tiny_llama()
    return wrap(target, table_head(target), num_speculative_tokens=3, tokenizer=Chatty(), max_model_len=40)


def tokens(found: Any) -> list[list[int]]:
    return [completion.token_ids for completion in found]


def test_options_are_fields_of_sampling_params(model: Any) -> None:
    given = SamplingParams(temperature=0.9, seed=4, max_new_tokens=6)
    assert tokens(model.generate(PROMPTS, temperature=0.9, seed=4, max_new_tokens=6)) == tokens(
        model.generate(PROMPTS, given)
    )
    assert tokens(model.generate(PROMPTS, given, temperature=0.0)) == RIGHT
    assert tokens(model.generate(PROMPTS, [given, SamplingParams()], temperature=0, max_new_tokens=6)) == RIGHT
    assert [c.token_ids for _, c in sorted(model.generate_iter(PROMPTS, max_new_tokens=6))] == RIGHT
    done = [u.completion for u in model.stream(PROMPTS[0], max_new_tokens=6) if u.completion]
    assert tokens(done) == RIGHT[:1]


CALLS: dict[str, Any] = {
    "a batch's fields": lambda m: m.generate(
        **BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}), max_new_tokens=6
    ),
    "ids and a mask": lambda m: m.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6),
    "inputs=": lambda m: m.generate(inputs=IDS, max_new_tokens=6),
    "prompts=": lambda m: m.generate(prompts=PROMPTS, params=SamplingParams(max_new_tokens=6)),
    "generation_config=": lambda m: m.generate(IDS, generation_config=GenerationConfig(max_new_tokens=6)),
    "a config and an option": lambda m: m.generate(IDS, generation_config=GenerationConfig(), max_new_tokens=6),
    "sampling_params=": lambda m: m.generate(IDS, sampling_params=SamplingParams(max_new_tokens=6)),
    "what is off": lambda m: m.generate(
        IDS, max_new_tokens=6, num_beams=1, use_cache=True, pad_token_id=0, streamer=None, return_dict_in_generate=False
    ),
    "do_sample": lambda m: m.generate(IDS, do_sample=False, temperature=0.7, max_new_tokens=6),
    "num_return_sequences": lambda m: m.generate(IDS, num_return_sequences=1, max_new_tokens=6),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_other_projects_are_served(call: str, model: Any) -> None:
    assert tokens(CALLS[call](model)) == RIGHT


def test_a_mask_leaves_padding_out(model: Any) -> None:
    ids, mask = torch.tensor([[0, 0, *PROMPTS[0]]]), torch.tensor([[0, 0, *[1] * 9]])
    assert tokens(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6)) == RIGHT[:1]


def test_do_sample_is_read_as_transformers_reads_it(model: Any) -> None:
    """top_k=50 and temperature 1 by default; of a config, a temperature alone samples."""
    right = tokens(model.generate(IDS, SamplingParams(temperature=1.0, top_k=50, seed=3, max_new_tokens=6)))
    assert tokens(model.generate(IDS, do_sample=True, seed=3, max_new_tokens=6)) == right != RIGHT
    config = GenerationConfig(max_new_tokens=6)
    assert tokens(model.generate(IDS, generation_config=config, temperature=1.0, seed=3)) == right
    assert config.do_sample is None and config.temperature is None, "the caller's own is not changed"


def test_options_that_only_we_have_go_with_a_config(model: Any) -> None:
    (first, _) = model.generate(IDS, generation_config=GenerationConfig(max_new_tokens=6), logprobs=1)
    assert first.logprobs is not None and first.token_ids == RIGHT[0]


def test_chat_makes_texts_what_the_user_says(model: Any) -> None:
    right = tokens(model.generate([{"role": "user", "content": "abc"}], max_new_tokens=6))
    assert tokens(model.generate("abc", chat=True, max_new_tokens=6)) == right
    assert tokens(model.generate(["abc"], chat=True, max_new_tokens=6)) == right
    assert tokens(model.generate("abc", max_new_tokens=6)) != right, "a text is read as it is"
    assert model.generate("abc", max_new_tokens=1)[0].prompt_token_ids == Chatty()("abc")["input_ids"]
    with pytest.raises(InvalidInputError, match=r"chat=True: \[1, 2\] is neither text nor a list of chat messages"):
        model.generate([1, 2], chat=True)
    with pytest.raises(InvalidInputError, match="chat='yes': allowed are True and False"):
        model.generate("abc", chat="yes")


def test_options_of_the_chat_template(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    plain = Chatty.apply_chat_template
    monkeypatch.setattr(Chatty, "apply_chat_template", lambda *a, **own: seen.append(own) or plain(*a))
    chat = [{"role": "user", "content": "abc"}]
    given = {"continue_final_message": True, "chat_template_kwargs": {"x": 1}, "max_new_tokens": 1}
    assert len(model.generate([chat, chat], **given)) == 2 and model.generate("abc", chat=True, **given)
    assert len(list(model.generate_iter(iter([chat]), **given))) == 1
    right = {"x": 1, "add_generation_prompt": False, "continue_final_message": True, "return_dict": True}
    assert seen == [right] * 4
    more = {"tools": [{"a": 1}], "documents": [{"b": 2}], "chat_template": "y"}
    model.generate(chat, max_new_tokens=1, **more)
    assert seen[-1] == {**more, "add_generation_prompt": True, "return_dict": True}
    assert model.score(chat, [3], **more)[0].logprob == model.score("abc", [3], chat=True, logprobs=0)[0].logprob
    assert seen[-2] == {**more, "add_generation_prompt": True, "return_dict": True}
    with pytest.raises(InvalidInputError, match=r"'max_new_tokens'"):
        model.score(chat, [3], max_new_tokens=1)
    with pytest.raises(InvalidInputError, match="continue_final_message: 'abc' is no chat"):
        model.generate("abc", continue_final_message=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vLLM's max_tokens": (
        {"max_tokens": 16},
        r"'max_tokens': it is called max_new_tokens here: generate\(prompts, max_n",
    ),
    "a streamer": ({"streamer": object()}, r"'streamer': read a stream: for update in model\.stream\("),
    "beams": ({"num_beams": 4}, "'num_beams': beams are not searched"),
    "scores": ({"output_scores": True}, r"it is called return_scores here: generate\(prompts, return_scores=True\)"),
    "another head": ({"assistant_model": 1}, r"from_pretrained\(target, draft=…\)"),
    "vLLM's bar": ({"use_tqdm": True}, "it is called progress here"),
    "a length of both": ({"max_length": 30}, "it counts the prompt, too; give max_new_tokens"),
    "an image": ({"pixel_values": IDS}, "only text is served"),
    "a typo": (
        {"temprature": 1},
        r"'temprature': did you mean temperature\? known are max_new_tokens, temperature, top_k",
    ),
    "two": ({"max_tokens": 1, "frobs": 2}, "'max_tokens', 'frobs'"),
    "nonsense": ({"frobs": 2}, "'frobs': known are max_new_tokens"),
    "a bar of a stream": ({"progress": True}, r"generate\(prompts, …, progress=True\)"),
    "do_sample beside params": ({"params": SamplingParams(), "do_sample": True}, "temperature=0 is greedy"),
    "a config that is not served": (
        {"do_sample": True, "num_beams": 4},
        "not supported in GenerationConfig: num_beams=4",
    ),
    "params twice": (
        {"params": SamplingParams(), "generation_config": GenerationConfig()},
        "params and generation_config=",
    ),
    "prompts twice": ({"input_ids": IDS}, "prompts and input_ids= were both given"),
    "a bad value": ({"temperature": -1}, "temperature=-1: allowed is"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_not_served_names_the_right_call(call: str, model: Any) -> None:
    options, message = REFUSED[call]
    rounds = model.engine_stats.rounds
    with pytest.raises(InvalidInputError, match=message):
        model.stream(PROMPTS, **options)
    assert model.engine_stats.rounds == rounds


def test_prompts_by_another_name_are_refused_by_it(model: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"'messages': give the prompts as the first argument: generate\(prompts"
    ):
        model.generate(messages=[{"role": "user", "content": "abc"}])
    with pytest.raises(InvalidInputError, match=r"attention_mask: it belongs to token ids .*: generate\(\*\*inputs\)"):
        model.generate("abc", attention_mask=[1, 1, 1])
    with pytest.raises(InvalidInputError, match="no prompts in None"):
        model.generate(max_new_tokens=3)


def test_sampling_params_refuse_other_names() -> None:
    with pytest.raises(
        InvalidInputError, match=r"'max_tokens': it is called max_new_tokens here: SamplingParams\(max_new_to"
    ):
        SamplingParams(max_tokens=16)  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match="unexpected keyword argument 'temprature': did you mean temperature"):
        SamplingParams(temprature=0.7)  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match="unknown sampling option 'max_tokens': it is called max_new_tokens"):
        SamplingParams.from_dict({"max_tokens": 16})
    assert "max_new_tokens" in inspect.signature(SamplingParams).parameters
    given = SamplingParams(temperature=0.5)
    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == given
