"""First errors: each mistake has its own message that names it, is found before anything starts, and harms nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, eagle3_head, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from transformers import GenerationConfig

import specdec.engine.launcher
from drafters.eagle3.checkpoint import save_eagle3
from specdec.config import EngineConfig
from specdec.errors import (
    CacheTooSmallError,
    HeadLoadError,
    HeadMismatchError,
    InvalidInputError,
    ModelLoadError,
    OutOfPagesError,
    RoundFailedError,
    SpecdecError,
)
from specdec.loading.sizes import max_model_len
from specdec.model import SpeculativeModel
from specdec.requests.prompts import encode_prompts
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33))
SHORT = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def wrapped() -> Any:
    model = tiny_llama()
    options = {"num_speculative_tokens": 3, "max_model_len": 100, "kv_cache_tokens": 80}
    return wrap(model, table_head(model), **options)


def two(wrapped: Any, second: Any, params: Any = SHORT) -> Any:
    """A good prompt and then a bad one."""
    return wrapped.generate([PROMPTS[0], second], params)


MISTAKES: dict[str, tuple[Callable[[Any], object], type[SpecdecError], str]] = {
    "no tokens": (lambda w: w.generate([[]]), InvalidInputError, "the prompt is empty"),
    "empty text": (lambda w: w.generate(""), InvalidInputError, "the prompt is empty"),
    "empty among others": (lambda w: two(w, ""), InvalidInputError, "the prompt is empty"),
    "empty ids among others": (lambda w: two(w, []), InvalidInputError, "the prompt is empty"),
    "prompt too long": (
        lambda w: two(w, [1] * 100),
        InvalidInputError,
        "the prompt has 100 tokens; with max_model_len=100 at most 99 are allowed",
    ),
    "id too large": (lambda w: two(w, [3, 64]), InvalidInputError, r"token id 64 is outside the vocabulary 0 … 63"),
    "negative id": (lambda w: two(w, [-1, 3]), InvalidInputError, r"token id -1 is outside the vocabulary"),
    "cache too small": (
        lambda w: two(w, [1] * 60, SamplingParams(max_new_tokens=30)),
        CacheTooSmallError,
        "60 prompt tokens and 30 new ones need 90 cache places; the KV cache has 80; lower max_new_tokens or",
    ),
    "k too large": (
        lambda w: w.generate(PROMPTS, SamplingParams(num_speculative_tokens=4)),
        InvalidInputError,
        "num_speculative_tokens=4: this model was loaded for at most 3",
    ),
    "params do not match prompts": (
        lambda w: w.generate(PROMPTS, [SHORT] * 3),
        InvalidInputError,
        "3 SamplingParams for 2 prompts; give one, or one per prompt",
    ),
    "a wrong kind of prompt": (lambda w: w.generate([PROMPTS[0], 3.5]), InvalidInputError, "not float"),
    "chat without a template": (
        lambda w: w.generate([{"role": "user", "content": "hi"}]),
        InvalidInputError,
        "the tokenizer has no chat template; give text",
    ),
    "beams": (lambda w: w.generate(PROMPTS, GenerationConfig(num_beams=2)), InvalidInputError, "num_beams=2"),
    "unknown option": (
        lambda w: w.generate(PROMPTS, SamplingParams.from_dict({"temprature": 1})),
        InvalidInputError,
        r"unknown sampling option 'temprature': did you mean temperature\? known are max_new_tokens, temperature",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_request_harms_nothing(mistake: str, wrapped: Any) -> None:
    make, kind, message = MISTAKES[mistake]
    rounds = wrapped.engine_stats.rounds
    with pytest.raises(kind, match=message) as caught:
        make(wrapped)
    assert type(caught.value) is kind
    assert wrapped.engine_stats.rounds == rounds, "nothing was started"
    assert free_everywhere(wrapped)
    assert [c.token_ids for c in wrapped.generate(PROMPTS, SHORT)] == [hf_greedy(p, 8) for p in PROMPTS]


def test_a_prompt_that_just_fits_is_served(wrapped: Any) -> None:
    prompt = random_prompts([79])[0]
    (completion,) = wrapped.generate(prompt, SamplingParams(max_new_tokens=1))
    assert completion.token_ids == hf_greedy(prompt, 1)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "max_num_batched_tokens": ({"max_num_batched_tokens": 11}, "3 requests with 3 drafts each need at least 12"),
    "max_num_prefill_tokens": ({"max_num_prefill_tokens": 0}, "max_num_prefill_tokens=0: allowed is 1 or more"),
    "page_size": ({"page_size": 0}, "page_size=0: allowed is 1 or more"),
    "max_num_seqs": ({"max_num_seqs": 0}, "max_num_seqs=0: allowed is 1 or more"),
    "max_model_len": ({"max_model_len": 129}, "max_model_len=129: the model was made for at most 128"),
    "max_model_len 0": ({"max_model_len": 0}, "max_model_len=0: allowed is 1 or more"),
    "negative k": ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1: allowed is 0 or more"),
    "backend": ({"backend": "flash"}, "backend='flash': allowed are auto, torch, flashinfer, flex, batch_invariant"),
    "flashinfer on cpu": ({"backend": "flashinfer"}, "needs a CUDA device, not cpu; use backend='torch'"),
    "flex on cpu": ({"backend": "flex"}, "backend='flex' needs a CUDA device, not cpu; use backend='torch'"),
    "invariant on cpu": (
        {"backend": "batch_invariant", "cpu_linears": "plain"},
        "backend='batch_invariant' packs linear layers, but cpu_linears='plain' is given; use backend='torch'",
    ),
    "device": ({"device": "cpu"}, "device='cpu': the model is loaded already"),
    "dtype": ({"dtype": "float64"}, "dtype='float64', device=None: the model is loaded already"),
    "graphs": ({"cuda_graphs": True}, "cuda_graphs=True needs a backend for a GPU that has graphs, not 'torch'"),
    "no cache": ({"kv_cache_tokens": 0}, "kv_cache_tokens=0: allowed is 1 or more"),
    "cache": ({"kv_cache_tokens": 12}, "the KV cache has 3 pages of 4 tokens"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_wrong_option_is_refused_by_name(option: str) -> None:
    options, message = OPTIONS[option]
    model = tiny_llama()
    with pytest.raises(InvalidInputError, match=message):
        wrap(model, table_head(model), **{"num_speculative_tokens": 3, **options})


def test_a_device_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidInputError, match="device='gpu7' is not a torch device"):
        SpeculativeModel.from_pretrained("gsm-llama", device="gpu7")


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"training mode.*call model\.eval\(\)"):
        wrap(tiny_llama().train())


def test_a_failing_round_ends_every_call_that_shares_it(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (wrapped.stream(p, SamplingParams(max_new_tokens=40)) for p in PROMPTS[:2])
    next(first)
    next(second)
    with monkeypatch.context() as planted:
        planted.setattr(specdec.engine.launcher, "target_arrays", lambda *_, **__: 1 / 0)
        with pytest.raises(RoundFailedError, match=r"ZeroDivisionError.*the 2 requests in it were ended"):
            list(first)
    with pytest.raises(RoundFailedError, match="ZeroDivisionError") as caught:
        list(second)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert free_everywhere(wrapped)
    assert [c.token_ids for c in wrapped.generate(PROMPTS, SHORT)] == [hf_greedy(p, 8) for p in PROMPTS]


def test_drafts_need_a_head() -> None:
    with pytest.raises(InvalidInputError, match="num_speculative_tokens=3 needs a draft head: give draft="):
        wrap(tiny_llama(), num_speculative_tokens=3)


def test_a_model_without_a_name_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidInputError, match="no name to load a tokenizer by; give tokenizer="):
        SpeculativeModel.from_pretrained(tiny_llama())


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(ModelLoadError, match=f"cannot load the target model '{missing}'.*") as caught:
        SpeculativeModel.from_pretrained(missing)
    assert "a hub name, or a built-in name (gsm-llama" in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot load the target model"):
        SpeculativeModel.from_pretrained(tmp_path)


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="cannot load the target model"):
        SpeculativeModel.from_pretrained(tmp_path, tokenizer=LetterTokenizer())


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot load the tokenizer"):
        SpeculativeModel.from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_saved_model_works(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "target")
    save_eagle3(eagle3_head(model), tmp_path / "head")
    loaded = SpeculativeModel.from_pretrained(
        tmp_path / "target", tmp_path / "head", tokenizer=LetterTokenizer(), num_speculative_tokens=2
    )
    assert loaded.num_speculative_tokens == 2
    assert loaded.generate(PROMPTS[0], SHORT)[0].token_ids == hf_greedy(PROMPTS[0], 8)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadLoadError, match="nothing"):
        wrap(tiny_llama(), tmp_path / "nothing")


def test_a_folder_without_a_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadLoadError, match=str(tmp_path)):
        wrap(tiny_llama(), tmp_path)


def test_a_target_without_a_built_in_head_is_named() -> None:
    with pytest.raises(HeadLoadError, match="has no built-in head; give the head's folder"):
        wrap(tiny_llama(), "auto")


def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    save_eagle3(eagle3_head(tiny_llama()), tmp_path)
    with pytest.raises(HeadMismatchError, match=r"64.*32|32.*64"):
        wrap(tiny_llama(vocab_size=32), tmp_path)


def narrow() -> Any:
    """A target of another width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=128, pad_token_id=None, **sizes)).eval()


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    save_eagle3(eagle3_head(tiny_llama()), tmp_path)
    with pytest.raises(HeadMismatchError, match=r"32.*48|48.*32"):
        wrap(narrow(), tmp_path)


@pytest.mark.parametrize("other", [lambda: tiny_llama(vocab_size=32), narrow], ids=["vocabulary", "width"])
@pytest.mark.parametrize("make", [eagle3_head, table_head])
def test_a_loaded_head_of_another_target_is_refused(make: Any, other: Any) -> None:
    with pytest.raises(HeadMismatchError, match="made for another target"):
        wrap(other(), make(tiny_llama()))


def test_sizes_that_cannot_work_together_are_refused_by_the_config() -> None:
    good = {"max_model_len": 8, "max_num_seqs": 2, "max_num_batched_tokens": 8, "page_size": 4, "num_pages": 3}
    EngineConfig(num_speculative_tokens=3, **good)
    with pytest.raises(InvalidInputError, match="lower max_num_seqs or raise it"):
        EngineConfig(num_speculative_tokens=4, **good)
    with pytest.raises(InvalidInputError, match="max_num_prefill_tokens=0: allowed is 1 or more"):
        EngineConfig(num_speculative_tokens=3, max_num_prefill_tokens=0, **good)


def test_the_errors_are_value_errors_where_a_value_is_wrong() -> None:
    assert issubclass(CacheTooSmallError, ValueError) and issubclass(HeadMismatchError, ValueError)
    assert not issubclass(OutOfPagesError, ValueError)


class ChatTokenizer(LetterTokenizer):
    chat_template = "yes"

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        text = "".join(f"{m['role'][0]}.{m['content']}" for m in messages)
        if options == {"tokenize": False}:
            return text
        assert options == {"add_generation_prompt": True, "return_dict": True}
        return self(text)


def test_kinds_of_prompts() -> None:
    letters = LetterTokenizer()("abc")["input_ids"]
    chat = [{"role": "user", "content": "abc"}]
    tokenizer = ChatTokenizer()
    assert encode_prompts("abc", tokenizer) == [letters]
    assert encode_prompts(letters, tokenizer) == [letters]
    assert encode_prompts(torch.tensor(letters).numpy().tolist(), tokenizer) == [letters]
    assert encode_prompts(chat, tokenizer) == [tokenizer("u.abc")["input_ids"]]
    assert encode_prompts(["abc", letters, chat], tokenizer) == [letters, letters, tokenizer("u.abc")["input_ids"]]


ROPES: dict[str, tuple[dict[str, Any], int]] = {
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 128),
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_rotary_embedding_that_looks_at_the_whole_batch_bounds_the_length(kind: str) -> None:
    """Beyond the bound a request would come out otherwise beside a longer one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parameters, most = ROPES[kind]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=128, pad_token_id=None, **sizes)
    config.rope_parameters = {"rope_theta": 10000.0, **parameters}
    model = LlamaForCausalLM(config).eval()
    assert max_model_len(None, model) == most == max_model_len(most, model)
    if most < 128:
        message = rf"max_model_len={most + 1}: beyond {most} positions the model's rotary embedding \({kind}\) changes"
        with pytest.raises(InvalidInputError, match=message):
            max_model_len(most + 1, model)
