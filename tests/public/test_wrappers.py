"""Models that read images too, from a folder: text comes out as from their own `generate`, images are refused."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, random_prompts, wrap
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import specdec
from drafters.base import FINAL_NORM
from specdec import SamplingParams, SpeculativeModel
from specdec.cli.main import main
from specdec.errors import InvalidInputError, ModelLoadError, SpecdecError, UnsupportedModelError
from specdec.loading.heads import target_facts
from specdec.wrapped.probing import probe_target
from tests.hybrids import RecallHead
from tests.wrappers import (
    IMAGE,
    TEXT,
    TOWER,
    TYPES,
    VIDEO,
    WRAPPERS,
    model_of,
    own_text,
    tiny_config,
    tiny_wrapper,
    write,
)

QUICK = ("qwen2_5_vl", "mistral3", "gemma3")
ALIKE = (
    *("aya_vision", "glm4v_moe", "idefics2", "internvl", "llava_next", "llava_onevision"),
    *("qwen2_vl", "qwen3_vl", "qwen3_5_moe", "smolvlm", "vipllava"),
    *("aria", "cohere2_vision", "glm4v", "idefics3", "llava", "qwen3_vl_moe", "voxtral"),
)
"""Types whose language model is that of another one here, or nearly: `make test` leaves their text out."""
NEW = 16
PARAMS = SamplingParams(max_new_tokens=NEW)


def load(folder: Path, draft: Any = None, **options: Any) -> SpeculativeModel:
    """From a folder, with small sizes: prompts are read in chunks of 24 tokens."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400}
    return SpeculativeModel.from_pretrained(
        folder, draft, **{"tokenizer": LetterTokenizer(), "max_model_len": 120, **sizes, **options}
    )


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Random text prompts, without the ids that stand for images and videos."""
    return random_prompts(lengths, vocab_size=60)


def types() -> list[Any]:
    marks = {**dict.fromkeys(TYPES, pytest.mark.slow), **dict.fromkeys(ALIKE, pytest.mark.long)}
    return [name if name in QUICK else pytest.param(name, marks=marks[name]) for name in TYPES]


@pytest.mark.slow
@pytest.mark.parametrize("name", types())
@pytest.mark.thorough
def test_text_is_what_the_wrapper_generates(name: str, tmp_path: Path) -> None:
    """Without drafts, and with some right and some wrong ones; three prompts at once, read in chunks, and one alone."""
    wrapper = write(name, tmp_path)
    prompts = prompts_of([5, 37, 60])
    own = [own_text(wrapper, prompt, NEW) for prompt in prompts]
    with load(tmp_path, RecallHead(own, 0.6), num_speculative_tokens=3) as model:
        assert model.describe()["twin"].startswith("exact")
        found = model.generate(prompts, PARAMS)
        assert [c.prompt_token_ids + c.token_ids for c in found] == own
        rounds = [r for c in found for r in c.stats.rounds]
        assert 0 < sum(r.accepted for r in rounds) < sum(r.drafted for r in rounds)
        plain = replace(PARAMS, num_speculative_tokens=0)
        assert [c.prompt_token_ids + c.token_ids for c in model.generate(prompts[::-1], plain)] == own[::-1]
        assert model.generate(prompts[1], PARAMS)[0].token_ids == own[1][37:]
        assert own_text(model.hf_model, prompts[1], NEW) == own[1], "by the attention that transformers chooses itself"


@pytest.mark.slow
@pytest.mark.thorough
def test_prompts_of_a_wrapper_are_read_again_after_preemption(tmp_path: Path) -> None:
    """With a cache for less than three requests, a request is preempted and its text is what it is alone."""
    wrapper = write("qwen3_vl", tmp_path)
    prompts = prompts_of([30, 33, 36])
    own = [own_text(wrapper, prompt, 30) for prompt in prompts]
    with load(tmp_path, RecallHead(own, 0.6), num_speculative_tokens=3, kv_cache_tokens=132) as model:
        found = model.generate(prompts, SamplingParams(max_new_tokens=30))
        assert [c.prompt_token_ids + c.token_ids for c in found] == own
        assert model.engine_stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("glm4v", marks=pytest.mark.long)])
def test_positions_of_an_earlier_image_do_not_reach_later_texts(name: str, tmp_path: Path) -> None:
    """These models keep `rope_deltas` of the last image that their own `generate` read."""
    wrapper = write(name, tmp_path)
    (prompt,) = prompts_of([20])
    own = own_text(wrapper, prompt, NEW)
    with load(tmp_path) as model:
        inner: Any = model.hf_model
        inner.model.rope_deltas = torch.tensor([[-7]])
        assert model.generate(prompt, PARAMS)[0].token_ids == own[20:]
        assert inner.model.rope_deltas.tolist() == [[-7]]


@pytest.mark.slow
def test_images_in_a_prompt_are_refused_by_name(tmp_path: Path) -> None:
    write("qwen2_5_vl", tmp_path)
    with load(tmp_path) as model:
        for mark, field in ((IMAGE, "image_token_id"), (VIDEO, "video_token_id")):
            message = rf"token id {mark}, which stands for an image, .*\({field} .* at place 2; only text is served"
            with pytest.raises(InvalidInputError, match=message):
                model.generate([[1, 2, 3], [4, 5, mark, 6]], PARAMS)
        ids = torch.tensor([[1, 2, 3]])
        with pytest.raises(InvalidInputError, match=r"only text is served\); not supported next to them: pixel_values"):
            model.generate({"input_ids": ids, "pixel_values": torch.zeros(1, 3, 8, 8)}, PARAMS)
        with pytest.raises(InvalidInputError, match="mm_token_type_ids says that the prompt has an image"):
            model.generate({"input_ids": ids, "mm_token_type_ids": torch.tensor([[0, 1, 0]])}, PARAMS)
        plain = model.generate([1, 2, 3], PARAMS)[0].token_ids
        typed = {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}
        assert model.generate(typed, PARAMS)[0].token_ids == plain


@pytest.mark.slow
def test_token_types_that_a_model_reads_are_refused(tmp_path: Path) -> None:
    """Gemma 3 reads type 0 causally, and images (type 1) in both directions."""
    ids, zeros = torch.tensor([[1, 2, 3, 4]]), torch.zeros(1, 4, dtype=torch.long)
    wrapper = write("gemma3", tmp_path)
    with load(tmp_path) as model:
        typed = model.generate({"input_ids": ids, "token_type_ids": zeros}, PARAMS)[0]
        assert typed.token_ids == own_text(wrapper, ids[0].tolist(), NEW)[4:]
        image = {"input_ids": ids, "token_type_ids": zeros + 1}
        for given in (image, [image]):
            with pytest.raises(InvalidInputError, match=r"Gemma3.* reads them .*only text of type 0 is served"):
                model.generate(given, PARAMS)


@pytest.mark.slow
def test_the_vision_tower_is_loaded_and_never_run(tmp_path: Path) -> None:
    write("mistral3", tmp_path)
    with load(tmp_path, max_model_len=None) as model:
        inner: Any = model.hf_model
        calls: list[Any] = []
        inner.model.vision_tower.register_forward_pre_hook(lambda *args: calls.append(args))
        model.generate(prompts_of([30]), PARAMS)
        assert not calls
        assert model.config.max_model_len == 256, "of the text configuration"
        assert model.describe()["num_layers"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
@pytest.mark.cases(1)
def test_hidden_states_for_heads_are_those_of_the_language_model(name: str) -> None:
    """Inputs of layers for EAGLE-3 heads, and the final norm's output for multi-token-prediction modules."""
    wrapper = copy.deepcopy(model_of(name))
    prompt = prompts_of([9])
    with torch.no_grad():
        right = wrapper(torch.tensor(prompt), output_hidden_states=True, use_cache=False).hidden_states
    head = RecallHead([own_text(wrapper, prompt[0], 1)], 1.0)
    head.aux_layers = (0, 2, FINAL_NORM)
    seen: list[torch.Tensor] = []
    fuse = head.fuse
    head.fuse = lambda states: (seen.append(states.clone()), fuse(states))[1]  # type: ignore[method-assign]
    with wrap(wrapper, head, num_speculative_tokens=1, max_model_len=64) as model:
        seen.clear()
        model.generate(prompt, SamplingParams(max_new_tokens=4))
    states = seen[0][:9].split(32, dim=-1)
    for found, layer in zip(states, (0, 2, -1), strict=True):
        torch.testing.assert_close(found, right[layer][0])
    facts, last = target_facts(probe_target(wrapper)), wrapper.get_output_embeddings()
    assert facts.num_layers == 4 and facts.lm_head is last.weight and facts.embedding.shape == (64, 32)


BLIP: dict[str, Any] = {"text_config": {**TEXT, "encoder_hidden_size": 32}, "vision_config": TOWER}
REFUSED: dict[str, tuple[dict[str, Any], type[SpecdecError], str]] = {
    "paligemma": ({}, UnsupportedModelError, r"PaliGemma.*attends in both directions \(is_causal=False\)"),
    "blip": (BLIP, UnsupportedModelError, "Blip.* does not read text alone: .* 'pixel_values'"),
    "t5gemma2": ({}, ModelLoadError, "'t5gemma2' is an encoder and a decoder"),
    "florence2": ({}, ModelLoadError, "'florence2' is an encoder and a decoder"),
    "siglip": ({}, ModelLoadError, "'siglip' is no such model"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.cases(1)
def test_what_is_no_language_model_over_text_is_refused_by_name(name: str, tmp_path: Path) -> None:
    options, kind, reason = REFUSED[name]
    config = tiny_config(name) if name in WRAPPERS else AutoConfig.for_model(name, **options)
    if kind is UnsupportedModelError:
        tiny_wrapper(config).save_pretrained(tmp_path)
    else:
        config.save_pretrained(tmp_path)
    with pytest.raises(kind, match=reason):
        load(tmp_path)


@pytest.mark.slow
def test_the_generation_config_of_a_wrapper_applies(tmp_path: Path) -> None:
    wrapper = copy.deepcopy(model_of("llava"))
    (prompt,) = prompts_of([12])
    text = own_text(wrapper, prompt, NEW)
    wrapper.generation_config = GenerationConfig(eos_token_id=[text[15]], pad_token_id=0)
    wrapper.save_pretrained(tmp_path)
    with load(tmp_path) as model:
        found = model.generate(prompt, PARAMS)[0]
        assert prompt + found.token_ids == own_text(wrapper, prompt, NEW) and len(found.token_ids) < NEW
    wrapper.generation_config = GenerationConfig(guidance_scale=1.5)
    wrapper.save_pretrained(tmp_path)
    with load(tmp_path) as model, pytest.raises(InvalidInputError, match=r"guidance_scale=1\.5"):
        model.generate(prompt, max_new_tokens=NEW)


PARTS = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}\n{% endfor %}"
)


@pytest.mark.slow
def test_tokenizer_and_chat_template_are_read_from_a_processor_s_folder(tmp_path: Path) -> None:
    """The template in the processor's own file, and made for messages in parts: plain texts reach it all the same."""
    write_chatty(tmp_path)
    chat = [{"role": "user", "content": "Anna has eggs."}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Anna has eggs."}]}]
    with load(tmp_path, tokenizer=None) as model:
        plain, in_parts = (model.generate(given, PARAMS)[0] for given in (chat, parts))
        assert plain.prompt_token_ids == in_parts.prompt_token_ids
        assert "user: Anna has eggs." in model.tokenizer.decode(plain.prompt_token_ids)
        with pytest.raises(InvalidInputError, match="chat message 1 has a part of type 'image'; only text is served"):
            model.generate([{"role": "user", "content": [{"type": "image"}, *parts[0]["content"]]}], PARAMS)


@pytest.mark.slow
def test_lm_eval_asks_a_wrapper_from_a_folder(tmp_path: Path) -> None:
    """Its chats go through the same template, texts in parts."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from evals.accuracy.engine_lm import EngineLM
    from evals.runs.conversations import Configuration

    write_chatty(tmp_path)
    with load(tmp_path, tokenizer=None) as model:
        lm = EngineLM(model, Configuration("x", 0), max_gen_toks=NEW)
        prompt = lm.apply_chat_template([{"role": "user", "content": "Anna has eggs."}])
        assert "user: Anna has eggs." in prompt
        (answer,) = lm.generate_until([Instance("generate_until", {}, (prompt, {"until": []}), 0)])
        assert answer == model.generate(prompt, PARAMS)[0].text


def write_chatty(folder: Path) -> None:
    """A wrapper with the files of a processor: a built-in tokenizer, and an older template file."""
    builtin = Path(specdec.__file__).parent / "models" / "gsm-llama"
    vocabulary = len(AutoTokenizer.from_pretrained(builtin))
    tiny_wrapper(tiny_config("llava", vocab_size=vocabulary)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / name, folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor"}))


@pytest.mark.slow
def test_the_command_line_inspects_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chatty(tmp_path)
    monkeypatch.setattr(sys, "argv", ["specdec", "inspect", "--model", str(tmp_path), "--device", "cpu", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlavaForConditionalGeneration" and facts["num_layers"] == 4
    assert facts["refused_tokens"] == {"image_token_index": IMAGE}
