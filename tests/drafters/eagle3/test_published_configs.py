"""EAGLE-3 configurations as they are published, with real key names: each is read as its exporter meant it, or refused.

The tensors are tiny; what is tested is how config.json is read beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.base import FINAL_NORM, TargetFacts
from drafters.eagle3.checkpoint import describe_eagle, load_eagle
from drafters.eagle3.head import Eagle3Head
from drafters.errors import HeadLoadError

H, INTER, HEADS, KV, DIM, V, VD, LAYERS = 16, 24, 4, 2, 4, 40, 11, 8
Tensors = dict[str, torch.Tensor]

SAFEAILAB: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": INTER,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": V,
    "draft_vocab_size": VD,
}
VICUNA = SAFEAILAB | {"num_hidden_layers": LAYERS}
"""The target's number, as in SafeAILab's Vicuna heads and AngelSlim's templates."""
MODELOPT: dict[str, Any] = {
    **SAFEAILAB,
    "architectures": ["LlamaForCausalLMEagle3"],
    "head_dim": DIM,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    },
}
"""As NVIDIA ModelOpt's exporter writes it (modelopt/torch/export/plugins/hf_spec_export.py)."""


def eagle3_tensors(fc: bool = True) -> Tensors:
    """The tensors of a head of one layer, by SafeAILab's names."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV * DIM, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV * DIM, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (INTER, H),
        "midlayer.mlp.up_proj.weight": (INTER, H),
        "midlayer.mlp.down_proj.weight": (H, INTER),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (VD, H),
        **({"fc.weight": (H, 3 * H)} if fc else {}),
    }
    d2t = torch.arange(VD) * 2
    t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, torch.arange(VD) * 3, True)
    return {name: random(*shape) for name, shape in shapes.items()} | {"d2t": d2t, "t2d": t2d}


def write(folder: Path, config: dict[str, Any], tensors: Tensors | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(eagle3_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def target() -> TargetFacts:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    return TargetFacts(H, V, LAYERS, embedding=weight, lm_head=weight)


def load(folder: Path, *overrides: Any) -> Eagle3Head:
    return load_eagle(folder, target(), torch.float32, "cpu", *overrides)


def same(a: Eagle3Head, b: Eagle3Head) -> bool:
    """Whether two heads are the same module with the same weights."""
    left, right = a.state_dict(), b.state_dict()
    return a.spec == b.spec and left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def sources(folder: Path, *overrides: Any) -> dict[str, str]:
    return {field.name: field.source for field in describe_eagle(folder, target(), *overrides).fields}


@pytest.fixture
def plain(tmp_path: Path) -> Eagle3Head:
    """The head that its own one-layer configuration describes."""
    return load(write(tmp_path / "plain", SAFEAILAB))


def test_the_targets_number_of_layers_is_not_the_heads(plain: Eagle3Head, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", VICUNA)
    assert same(load(folder), plain)
    assert sources(folder)["num_layers"] == "tensors (config num_hidden_layers = 8 is the target's)"
    # Another number is a head whose layers are missing.
    with pytest.raises(HeadLoadError, match="num_hidden_layers = 2, but the checkpoint has tensors of 1 layer"):
        load(write(tmp_path / "cut", SAFEAILAB | {"num_hidden_layers": 2}))


def test_an_own_lm_head_beside_tied_embeddings_is_used(plain: Eagle3Head, tmp_path: Path) -> None:
    head = load(write(tmp_path / "head", SAFEAILAB | {"tie_word_embeddings": True}))
    assert same(head, plain) and head.spec.own_lm_head
    x = torch.randn(3, H)
    assert torch.equal(head.logits(x), plain.logits(x))


def test_modelopt_lists_no_layers_where_it_reads_the_last_state(tmp_path: Path) -> None:
    nested = MODELOPT["eagle_config"] | {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
    folder = write(tmp_path / "head", MODELOPT | {"eagle_config": nested}, eagle3_tensors(fc=False))
    head = load(folder)
    assert head.aux_layers == (FINAL_NORM,) and not head.spec.has_fc
    assert sources(folder)["aux_layers"] == "config eagle_config.use_aux_hidden_state"
    # An empty list alone says nothing, and an fc contradicts the flag.
    empty = nested | {"use_aux_hidden_state": True}
    with pytest.raises(HeadLoadError, match="must be a list of layer numbers"):
        load(write(tmp_path / "empty", MODELOPT | {"eagle_config": empty}))
    with pytest.raises(HeadLoadError, match=r"unknown: fc\.weight"):
        load(write(tmp_path / "fc", MODELOPT | {"eagle_config": nested}))


def test_modelopts_own_configuration(tmp_path: Path) -> None:
    assert load(write(tmp_path / "head", MODELOPT)).aux_layers == (2, 4, 5)


@pytest.mark.parametrize("nested", [True, False], ids=["eagle_config", "top"])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parallel_draft_step", 4, "parallel_draft_step = 4: the head drafts several tokens at once"),
        ("use_mtp_layernorm", True, "use_mtp_layernorm = True: the head normalises its inputs"),
    ],
)
def test_flags_that_change_what_a_head_computes(key: str, value: Any, words: str, nested: bool, tmp_path: Path) -> None:
    changed = {"eagle_config": MODELOPT["eagle_config"] | {key: value}} if nested else {key: value}
    with pytest.raises(HeadLoadError, match=words):
        load(write(tmp_path / "head", MODELOPT | changed))


@pytest.mark.parametrize(
    "names",
    [
        ("midlayer.self_attn.rotary_emb.inv_freq",),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    ],
)
def test_stray_rotary_buffers_are_left_out_by_name(names: tuple[str, ...], plain: Eagle3Head, tmp_path: Path) -> None:
    stray = {name: torch.full((DIM // 2,), 7.0) for name in names}
    folder = write(tmp_path / "head", SAFEAILAB, eagle3_tensors() | stray)
    assert same(load(folder), plain)
    text = str(describe_eagle(folder, target()))
    assert all(name in text for name in names) and "rotary buffers: they follow from the configuration" in text
    with pytest.raises(HeadLoadError, match=r"unknown: midlayer\.self_attn\.rotary_emb\.weight"):
        load(
            write(
                tmp_path / "odd",
                SAFEAILAB,
                eagle3_tensors() | {"midlayer.self_attn.rotary_emb.weight": stray[names[0]]},
            )
        )


KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Medusa": (
        "medusa_lm_head.pt",
        {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"},
        r"Medusa.*this kind of head is not supported: take an EAGLE-3, DFlash or DSpark head",
    ),
    "Hydra": ("hydra_lm_head.pt", {"hydra_num_heads": 4, "hydra_num_layers": 1}, "Hydra.*not supported"),
    "DFlash2": (
        "model.safetensors",
        {"architectures": ["DFlash2DraftModel"], "block_size": 16, "dflash_config": {"target_layer_ids": [1, 9]}},
        "EAGLE-3 heads.*layout is DFlash2",
    ),
    "DSpark": ("model.safetensors", {"architectures": ["DSparkDraftModel"]}, "EAGLE-3 heads.*layout is DSpark"),
    "P-EAGLE": ("model.safetensors", {"architectures": ["PEagleDraftModel"], "mask_token_id": 7}, "P-EAGLE.*not supp"),
    "MLP speculator": (
        "model.safetensors",
        {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": 4},
        "MLP speculator.*not supported",
    ),
    "Gemma 4": ("model.safetensors", {"model_type": "gemma4_assistant"}, "Gemma 4 assistant.*not supported"),
    "speculators peagle": (
        "model.safetensors",
        {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"},
        "speculators of type 'peagle'",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_are_not_served_are_named(name: str, tmp_path: Path) -> None:
    """By config.json, before weights are looked for: some keep them in files of other names."""
    file, config, words = KINDS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / file)
    else:
        torch.save({"0.0.linear.weight": torch.zeros(2, 2)}, tmp_path / file)
    with pytest.raises(HeadLoadError, match=words):
        load(tmp_path)


def test_parallel_draft_heads_are_named_by_their_tensors(tmp_path: Path) -> None:
    tensors = eagle3_tensors() | {"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.zeros(H, H)}
    with pytest.raises(HeadLoadError, match=r"EAGLE-3 with parallel draft heads.*not supported"):
        load(write(tmp_path, SAFEAILAB, tensors))
