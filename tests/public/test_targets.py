"""Targets that paged attention would make say something else are refused by name; all others say what they say alone.

Every model has thresholds (a window of 32 tokens, …) that lie beyond short dummy prompts and before the prompts here.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from fakes import TINY, enlarge, random_prompts, tiny_llama, wrap
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    MllamaForCausalLM,
    MllamaTextConfig,
    PreTrainedModel,
)

from specdec import SamplingParams
from specdec.errors import InvalidInputError, SpecdecWarning, UnsupportedModelError

pytestmark = pytest.mark.usefixtures("every_self_test")

WINDOW = 32
NEW = 8
SIZES = {**TINY, "max_position_embeddings": 256}
MIXED = ["sliding_attention", "full_attention"] * 2
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
EXACT: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": MIXED, "sliding_window": WINDOW, "query_pre_attn_scalar": 20},
    "gpt_oss": {"layer_types": MIXED, "sliding_window": WINDOW, "rope_parameters": {"rope_type": "default"}, **MOE},
    "deepseek_v2": LATENT,
    "qwen3_moe": {**MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    "phimoe": {**MOE, "head_dim": None, "sliding_window": None},
    "afmoe": {**MOE, "layer_types": MIXED, "sliding_window": WINDOW, "num_dense_layers": 1, "num_shared_experts": 1},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": WINDOW,
            "llama_4_scaling_beta": 0.1,
        }
    },
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "phimoe": ({**MOE, "head_dim": None, "sliding_window": WINDOW}, "sliding_window=32"),
    "qwen2_moe": (
        {**MOE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "head_dim": None},
        "sliding_window=32",
    ),
    "olmoe": ({**MOE, "sliding_window": WINDOW, "head_dim": None}, "sliding_window=32"),
    "mllama_text_model": ({"cross_attention_layers": [1], "bos_token_id": 0, "eos_token_id": 1,
                           "pad_token_id": 0}, "MllamaForCausalLM"),
}  # fmt: skip
OLD_DECODERS = {
    name: {"d_model": 32, "num_hidden_layers": 2, "encoder_layers": 2,
           "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 64,
           "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
    for name in ("plbart", "marian", "pegasus", "blenderbot-small")
}  # fmt: skip


def build(kind: str, options: dict[str, Any]) -> PreTrainedModel:
    sizes = {name: value for name, value in {**SIZES, **options}.items() if value is not None or name != "head_dim"}
    torch.manual_seed(0)
    if kind == "mllama_text_model":
        model: Any = MllamaForCausalLM._from_config(MllamaTextConfig(**sizes)).eval()
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    enlarge(model)
    return model


def thinker(kind: str) -> PreTrainedModel:
    """The part of a Qwen omni model that reads and answers; its forward has no `logits_to_keep`."""
    moe = kind == "qwen3_omni_moe"
    name = "Qwen3OmniMoe" if moe else "Qwen2_5Omni"
    config_class = getattr(transformers.models, kind)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {**SIZES, "rope_parameters": rope, **(MOE if moe else {})}
    if not moe:
        text |= {"hidden_size": 64}
        del text["head_dim"]
    audio: dict[str, Any] = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 32,
        "output_dim": text["hidden_size"],
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "out_hidden_size": text["hidden_size"],
    }
    if moe:
        vision["deepstack_visual_indexes"] = [0]
    config = getattr(config_class, f"{name}ThinkerConfig")(text_config=text, audio_config=audio, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(config_class, f"{name}ThinkerForConditionalGeneration")(config).eval()
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    enlarge(model)
    return model


def says_alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens by the model's own eager forward over the whole row, one prompt at a time, without any cache."""
    model.set_attn_implementation("eager")
    row = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row[len(prompt) :]


def generates_alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    model.set_attn_implementation("eager")
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    return list(out[0, len(prompt) :].tolist())


def check_exact(model: PreTrainedModel, alone: Any = generates_alone) -> None:
    """Three prompts at once, read in chunks, and one by itself."""
    prompts = random_prompts([5, 37, 90])
    wrapped = wrap(model, max_model_len=120)
    params = SamplingParams(max_new_tokens=NEW)
    found = [completion.token_ids for completion in wrapped.generate(prompts, params)]
    single = wrapped.generate(prompts[1], params)[0].token_ids
    right = [alone(model, prompt) for prompt in prompts]
    assert found == right and single == right[1]
    assert wrapped.describe()["twin"].startswith("exact")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [n if n in ("gemma3_text", "gpt_oss", "deepseek_v2") else pytest.param(n, marks=pytest.mark.slow) for n in EXACT],
)
@pytest.mark.cases(1)
def test_a_supported_family_is_exact_past_its_thresholds(kind: str) -> None:
    check_exact(build(kind, EXACT[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_omni", pytest.param("qwen3_omni_moe", marks=pytest.mark.long)])
def test_a_model_without_logits_to_keep_is_exact(kind: str) -> None:
    check_exact(thinker(kind), says_alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, kind in enumerate(WRONG)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
@pytest.mark.cases(1)
def test_a_family_that_would_be_wrong_past_a_threshold_is_refused_by_name(kind: str, dtype: torch.dtype) -> None:
    options, reason = WRONG[kind]
    with pytest.raises(UnsupportedModelError, match=reason):
        wrap(build(kind, options).to(dtype), max_model_len=120)


@pytest.mark.slow
def test_a_threshold_that_no_request_reaches_does_not_matter() -> None:
    """As the message says: with requests no longer than the window the model is served, and exact."""
    options, _ = WRONG["phimoe"]
    model = build("phimoe", options)
    wrapped = wrap(model, max_model_len=WINDOW)
    prompt = random_prompts([WINDOW - NEW])[0]
    assert wrapped.generate(prompt, SamplingParams(max_new_tokens=NEW))[0].token_ids == generates_alone(model, prompt)


@pytest.mark.parametrize("kind", OLD_DECODERS)
@pytest.mark.cases(1)
def test_half_precision_does_not_hide_ignored_positions(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **OLD_DECODERS[kind])).eval()
    with pytest.raises(UnsupportedModelError, match="comes out wrong"):
        wrap(model.to(torch.bfloat16), max_model_len=100)


class NoSelection(LlamaForCausalLM):
    """Its forward takes `logits_to_keep` among **kwargs and ignores it."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("logits_to_keep", None)
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class Strict(LlamaForCausalLM):
    """Its forward knows no `logits_to_keep` at all."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, attention_mask: Any = None,
                use_cache: Any = None, past_key_values: Any = None) -> Any:  # fmt: skip
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=use_cache,
            past_key_values=past_key_values,
        )  # fmt: skip


class Shifted(LlamaForCausalLM):
    """Answers with the row before the one that was asked for."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        if isinstance(logits_to_keep, torch.Tensor):
            logits_to_keep = (logits_to_keep - 1).clamp_min(0)
        return super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)


class ForgetsPositions(LlamaForCausalLM):
    """Positions from a limit on are those of the batch, not those it is given."""

    limit = 64

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is not None:
            own = torch.arange(input_ids.shape[1])[None]
            position_ids = torch.where(position_ids >= self.limit, own, position_ids)
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class ForgetsFarPositions(ForgetsPositions):
    """The same far beyond any row that is cheap to read, said by its configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.limit = config.position_window


class ChunkMask(LlamaForCausalLM):
    """Attends inside chunks only, by a mask that paged attention never sees."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if self.config._attn_implementation in ("eager", "sdpa"):
            place = torch.arange(input_ids.shape[1])
            chunk = place // self.config.attention_chunk_size
            visible = (place[:, None] >= place) & (chunk[:, None] == chunk)
            kwargs["attention_mask"] = torch.where(visible, 0.0, -1e9)[None, None]
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class OnlyBatches(LlamaForCausalLM):
    """Crashes on a batch of one token or one row of four."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is not None and not bool((position_ids[0] <= 19).any()):
            raise IndexError("index 1 is out of bounds")
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


def planted(kind: type[LlamaForCausalLM], **options: Any) -> PreTrainedModel:
    """A tiny Llama of this class."""
    plain = tiny_llama(context=0.35)
    config = copy.deepcopy(plain.config)
    config.max_position_embeddings = 4096
    for name, value in options.items():
        setattr(config, name, value)
    model = kind(config).eval()
    model.load_state_dict(plain.state_dict())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NoSelection, Strict])
@pytest.mark.cases(1)
def test_rows_are_right_when_a_forward_selects_none(kind: type[LlamaForCausalLM]) -> None:
    check_exact(planted(kind), says_alone)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Shifted, {}, "comes out wrong"),
        (ForgetsPositions, {}, "comes out wrong"),
        (ForgetsFarPositions, {"position_window": 2000}, "position_window=2000"),
        (ChunkMask, {"attention_chunk_size": 2000}, "attention_chunk_size=2000"),
        (OnlyBatches, {}, "fails when 1 row.*IndexError: index 1 is out of bounds"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
@pytest.mark.cases(1)
def test_a_planted_defect_is_refused(
    kind: type[LlamaForCausalLM], options: dict[str, Any], reason: str, dtype: torch.dtype
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} .*{reason}"):
        wrap(planted(kind, **options).to(dtype), max_model_len=4096, kv_cache_tokens=4096)


class OwnConfigOnly(LlamaForCausalLM):
    """Can be built in one size only, as some remote code."""

    def __init__(self, config: Any) -> None:
        if config.hidden_size != 32:
            raise ValueError("the width must be 32")
        super().__init__(config)


def test_a_model_without_a_twin_is_tested_itself_and_says_what_was_not() -> None:
    with pytest.warns(SpecdecWarning, match=r"sliding_window=2000 were not tested.*the width must be 32"):
        wrapped = wrap(planted(OwnConfigOnly, sliding_window=2000), max_model_len=4096)
    assert "the width must be 32" in wrapped.describe()["twin"]


@pytest.mark.slow
@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.cases(1)
def test_a_softcap_that_the_models_own_attention_leaves_out_is_named(own: str) -> None:
    """transformers 5.17 takes sdpa for Gemma 2 unless told otherwise; its tokens are not those with the softcap."""
    config = Gemma2Config(**TINY, query_pre_attn_scalar=1, attn_logit_softcapping=0.05, attn_implementation="eager")
    model = Gemma2ForCausalLM(config).eval()
    enlarge(model, 0)
    (prompt,) = random_prompts((40,))

    def own_tokens() -> list[int]:
        return model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()

    ids = own_tokens()
    vars(model.config)["_attn_implementation_internal"] = own
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", SpecdecWarning)
        wrapped = wrap(model)
    words = [str(w.message) for w in said if "attn_implementation='sdpa'" in str(w.message)]
    assert len(words) == (own == "sdpa")
    assert wrapped.generate(prompt, SamplingParams(max_new_tokens=16))[0].token_ids == ids
    if own == "sdpa":
        assert "softcap of 0.05" in words[0]
        with contextlib.suppress(ValueError):  # newer versions of transformers
            assert own_tokens() != ids


def test_nan_is_called_nan() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"logits .* contain NaN.*layers\.1\.mlp\.up_proj\.weight"):
        wrap(model)


def test_a_family_that_reads_its_mask_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"does not call transformers' attention interface.*alibi"):
        wrap(build("falcon", {"head_dim": None, "alibi": True}), max_model_len=100)


def test_sparse_attention_is_refused_beyond_the_length_up_to_which_it_is_dense() -> None:
    options = {**LATENT, "index_topk": 16, "index_n_heads": 4, "index_head_dim": 16}
    with pytest.raises(InvalidInputError, match=r"max_model_len=100: beyond index_topk=16 tokens"):
        wrap(build("deepseek_v32", options), max_model_len=100)
