"""One head per published layout, tiny: config.json and tensors with the exporter's own spellings, and what it is.

The second is said here by hand (`tests.by_hand.ByHand`): nothing of it is read from the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from fakes import TINY, VOCAB, enlarge
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.by_hand import ByHand, dynamic_angles, linear_angles, llama3_angles, plain_angles, yarn_angles, yarn_scale

H, INTER, HEADS, KV, DIM = 32, 40, 4, 2, 16
LAYERS = 8
"""Of the target, so that the default aux layers 2, 4, 5 are three."""
VD = 12
Tensors = dict[str, torch.Tensor]


@cache
def _target() -> LlamaForCausalLM:
    config = LlamaConfig(**{**TINY, "num_hidden_layers": LAYERS, "tie_word_embeddings": False})
    model = LlamaForCausalLM(config).eval()
    enlarge(model, 0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.015)
            layer.mlp.down_proj.weight.mul_(0.015)
    return model


def target() -> LlamaForCausalLM:
    """A Llama of 8 layers that says mostly what its last token alone would make it say."""
    model = LlamaForCausalLM(_target().config).eval()
    model.load_state_dict(_target().state_dict())
    return model


class Maker:
    """Random tensors of a head that is right often: what it attends to is mostly its own token's embedding."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._basis = torch.linalg.qr(self.random(H, H, size=1.0)).Q  # [KV·DIM, H]
        self.tensors: Tensors = {}

    def random(self, *shape: int, size: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * size

    def put(self, name: str, *shape: int, size: float = 0.05) -> None:
        """A matrix, a bias, or a norm (around 1)."""
        noise = self.random(*shape, size=size)
        centre = 1.0 if len(shape) == 1 and not name.endswith("bias") else 0.0
        self.tensors[name] = noise + centre

    def layer(self, prefix: str, width: int, echo: bool, biases: tuple[str, ...] = (), qk_norm: bool = False) -> None:
        """A decoder layer whose attention reads `width`; `echo`: its first H columns come out as they are."""
        sizes = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM}
        for name, rows in sizes.items():
            self.put(f"{prefix}self_attn.{name}_proj.weight", rows, width)
        self.put(f"{prefix}self_attn.o_proj.weight", H, HEADS * DIM)
        for name, shape in (("gate", (INTER, H)), ("up", (INTER, H)), ("down", (H, INTER))):
            self.put(f"{prefix}mlp.{name}_proj.weight", *shape)
        for name in biases:
            rows = {"o": H, "gate": INTER, "up": INTER, "down": H}.get(name, sizes.get(name, 0))
            part = "mlp" if name in ("gate", "up", "down") else "self_attn"
            self.put(f"{prefix}{part}.{name}_proj.bias", rows, size=0.2)
        if qk_norm:
            self.put(f"{prefix}self_attn.q_norm.weight", DIM)
            self.put(f"{prefix}self_attn.k_norm.weight", DIM)
            self.tensors[f"{prefix}self_attn.q_norm.weight"] *= 3
        self.put(f"{prefix}post_attention_layernorm.weight", H, size=0.2)
        if echo:
            self._echo(f"{prefix}self_attn.")

    def _echo(self, prefix: str) -> None:
        groups = self._basis.view(KV, DIM, H).repeat_interleave(HEADS // KV, 0)  # [HEADS, DIM, H]
        self.tensors[f"{prefix}q_proj.weight"][:, :H] += 1.5 * groups.flatten(0, 1)
        self.tensors[f"{prefix}k_proj.weight"][:, :H] += 1.5 * self._basis
        self.tensors[f"{prefix}v_proj.weight"][:, :H] += self._basis
        self.tensors[f"{prefix}o_proj.weight"] += groups.flatten(0, 1).T * (2 / (HEADS // KV))

    def eagle3(self, prefix: str = "midlayer.", aux: int = 3, vocab: int = VD, **options: Any) -> None:
        """The tensors that every EAGLE-3 head of one layer has."""
        if aux:
            self.put("fc.weight", H, aux * H, size=0.01)
        self.layer(prefix, 2 * H, echo=True, **options)
        self.put(f"{prefix}input_layernorm.weight", H, size=0.1)
        self.put(f"{prefix}hidden_norm.weight", H, size=0.2)
        self.put("norm.weight", H, size=0.1)
        ids = known_ids() if vocab == VD else torch.arange(vocab)
        self.tensors["lm_head.weight"] = _target().lm_head.weight.detach()[ids] + self.random(vocab, H, size=0.02)
        if vocab == VD:
            self.tensors["d2t"] = known_ids() - torch.arange(VD)
            self.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known_ids(), True)

    def further(self, index: int, **options: Any) -> None:
        """A further layer: an ordinary one."""
        self.layer(f"layers.{index}.", H, echo=False, **options)
        self.put(f"layers.{index}.input_layernorm.weight", H, size=0.1)

    def embedding(self) -> None:
        """An embedding that is the head's own."""
        own = _target().get_input_embeddings().weight.detach()
        self.tensors["embed_tokens.weight"] = own + self.random(VOCAB, H, size=0.03)


@cache
def known_ids() -> torch.Tensor:
    """[Vd] ascending: tokens that the target says often."""
    return torch.tensor([1, 5, 10, 11, 12, 13, 25, 41, 42, 45, 48, 57])


@dataclass(frozen=True)
class Layout:
    """A head in one layout.

    Attributes:
        config: config.json. tensors: by their names in the files.
        truth: arguments of `ByHand` beside weights and what the target shares.
        file: how the weights are stored.
    """

    config: dict[str, Any]
    tensors: Tensors
    truth: dict[str, Any] = field(default_factory=dict)
    file: Literal["bin", "one", "shards"] = "one"

    def write(self, folder: Path, **config: Any) -> Path:
        """The folder as published; `config`: changes to it, None removes a key."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = {key: value for key, value in (self.config | config).items() if value is not None or key not in config}
        (folder / "config.json").write_text(json.dumps(whole))
        stored = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
        if self.file == "bin":
            torch.save(stored, folder / "pytorch_model.bin")
        elif self.file == "one":
            save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            names = sorted(stored)
            where = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
            for file in set(where.values()):
                save_file({name: stored[name] for name in names if where[name] == file}, folder / file)
            index = {"metadata": {"total_size": 0}, "weight_map": where}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def by_hand(self) -> ByHand:
        """The same head, by hand."""
        weights = {name.removeprefix("model."): t.double().numpy() for name, t in self.tensors.items()}
        shared = _target().state_dict()
        own_embedding = weights.get("embed_tokens.weight") if self.truth.get("generation", 3) == 3 else None
        embedding = shared["model.embed_tokens.weight"].double().numpy() if own_embedding is None else own_embedding
        output = weights.get("lm_head.weight", shared["lm_head.weight"].double().numpy())
        ids = known_ids().numpy() if "d2t" in weights else None
        sizes = {"heads": HEADS, "kv_heads": KV, "dim": DIM, "eps": 1e-6, "angles": plain_angles(DIM)}
        told = sizes | {"embedding": embedding, "output": output, "ids": ids, "taps": (2, 4, 5)} | self.truth
        return ByHand(weights, **told)


LLAMA: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": INTER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NARROW = {"head_dim": DIM}
"""Written by exporters of newer transformers; here H / heads is another width."""


def safeailab() -> Layout:
    """traineagle3/config.json as published, fp16 in a pickle; head_dim is H / heads there, so it is written here."""
    make = Maker(1)
    make.eagle3()
    config = LLAMA | NARROW | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": VD}
    config |= {"pad_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float16"}
    config |= {"transformers_version": "4.28.1"}
    half = {name: t.half() if t.is_floating_point() else t for name, t in make.tensors.items()}
    return Layout(config, half, file="bin")


def specforge() -> Layout:
    """configs/qwen3-30B-A3B-eagle3.1.json of SpecForge, as its exporter writes it: shards, both rope spellings."""
    make = Maker(2)
    make.eagle3()
    for i in range(3):
        make.put(f"fc_norm.{i}.weight", H, size=0.3)
    config = LLAMA | NARROW | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"draft_vocab_size": VD, "fc_norm": True, "norm_output": True, "attention_bias": False}
    config |= {"rope_theta": 1000000.0, "rope_scaling": None, "tie_word_embeddings": False}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    config |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 48, "pretraining_tp": 1}
    config |= {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}
    truth = {"fusion": "each", "feed_normed": True, "taps": (1, 4, 7), "angles": plain_angles(DIM, 1e6)}
    return Layout(config, make.tensors, truth, "shards")


def specforge_wide() -> Layout:
    """An older export: norms per state under their old names and one over all, bias in fc, llama3 RoPE, boundaries."""
    make = Maker(15)
    make.eagle3(biases=("q", "k", "v"))
    make.put("fc.bias", H, size=0.2)
    for name in ("low", "mid", "high"):
        make.put(f"aux_norm_{name}.weight", H, size=0.3)
    make.put("input_norm.weight", 3 * H, size=0.3)
    config = LLAMA | NARROW | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "qwen2", "bias": True}
    config |= {"draft_vocab_size": VD, "attention_bias": True, "use_aux_norm": True, "rope_theta": 500000.0}
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    config |= {"rope_scaling": llama3 | {"original_max_position_embeddings": 16}}
    config |= {"eagle_config": {"norm_before_fc": True}, "eagle_aux_hidden_state_layer_ids": [0, 3, 7]}
    angles = llama3_angles(DIM, 500000.0, 8.0, 1.0, 4.0, 16)
    return Layout(config, make.tensors, {"fusion": "both", "taps": (0, 3, 7), "angles": angles})


def safeailab_narrow() -> Layout:
    """A head of half the target's width (`target_hidden_size`), which brings its own embedding and all of V."""
    make, half = Maker(16), H // 2
    make.put("fc.weight", half, 3 * H, size=0.2)
    for name, rows in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM)):
        make.put(f"midlayer.self_attn.{name}_proj.weight", rows, 2 * half, size=0.3)
    make.put("midlayer.self_attn.o_proj.weight", half, HEADS * DIM, size=0.3)
    for name, shape in (("gate", (INTER, half)), ("up", (INTER, half)), ("down", (half, INTER))):
        make.put(f"midlayer.mlp.{name}_proj.weight", *shape, size=0.2)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        make.put(f"midlayer.{name}.weight", half, size=0.2)
    make.put("norm.weight", half, size=0.2)
    make.put("embed_tokens.weight", VOCAB, half, size=1.0)
    make.put("lm_head.weight", VD, half, size=1.0)
    make.tensors["d2t"] = known_ids() - torch.arange(VD)
    make.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known_ids(), True)
    config = LLAMA | NARROW | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": VD}
    return Layout(config | {"hidden_size": half, "target_hidden_size": H}, make.tensors, file="bin")


SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "model_type": "speculator_model",
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "draft_vocab_size": VD,
    "target_hidden_size": None,
    "embed_requires_grad": False,
    "dtype": "float32",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]},
    },
}


def speculators_llama() -> Layout:
    """As the package trains by default: norm_before_residual, norm_before_fc, norm_output, an own embedding.

    Of the layer's configuration what equals LlamaConfig's default is left out (rms_norm_eps, max_position_embeddings).
    """
    make = Maker(3)
    make.eagle3("layers.0.")
    make.embedding()
    make.put("input_norm.weight", 3 * H, size=0.3)
    layer = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    layer |= {"model_type": "llama", "num_key_value_heads": KV, "num_hidden_layers": 1, "head_dim": DIM}
    layer |= {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "transformers_version": "4.57.1"}
    config = SPECULATORS | {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    config |= {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True}
    truth: dict[str, Any] = {"first": "layers.0.", "fusion": "whole", "normed_residual": True, "feed_normed": True}
    return Layout(config, make.tensors, truth | {"taps": (2, 4, 6), "angles": plain_angles(DIM, 5e5)})


def speculators_qwen3() -> Layout:
    """Two Qwen3 layers, the second with a sliding window; biases; dynamic RoPE, where positions count from 1."""
    make = Maker(4)
    biases = ("q", "k", "v", "o")
    make.eagle3("layers.0.", biases=biases, qk_norm=True)
    make.further(1, biases=biases, qk_norm=True)
    layer = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    layer |= {"model_type": "qwen3", "num_key_value_heads": KV, "num_hidden_layers": 2, "head_dim": DIM}
    layer |= {"attention_bias": True, "max_position_embeddings": 12, "use_sliding_window": True, "sliding_window": 5}
    layer |= {"layer_types": ["full_attention", "sliding_attention"]}
    layer |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}}
    config = SPECULATORS | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
    config |= {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    config |= {"eagle_aux_hidden_state_layer_ids": None}
    angles = dynamic_angles(DIM, 10000.0, 4.0, 12, first=1)
    return Layout(config, make.tensors, {"first": "layers.0.", "layers": 2, "windows": {1: 5}, "angles": angles})


def modelopt() -> Layout:
    """ModelOpt's exporter: the last state alone, an empty list of layers, its own default RoPE."""
    make = Maker(5)
    make.eagle3(aux=0)
    config = LLAMA | NARROW | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"draft_vocab_size": VD, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0}
    config |= {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}}
    config |= {"max_position_embeddings": 65536, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    eagle = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": False, "use_mtp_layernorm": False}
    eagle |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True}
    config |= {"eagle_config": eagle | {"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}}
    truth = {"taps": "final", "angles": yarn_angles(DIM, 10000.0, 32.0, 2048), "scale": yarn_scale(32.0)}
    return Layout(config, make.tensors, truth)


def angelslim() -> Layout:
    """AngelSlim's template for a model that reads images: the target's number of layers, tied embeddings, mrope."""
    make = Maker(6)
    make.eagle3()
    config = LLAMA | NARROW | {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama"}
    config |= {"attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "draft_vocab_size": VD}
    config |= {"num_hidden_layers": LAYERS, "tie_word_embeddings": True, "rope_theta": 5000000, "modal_type": "VLM"}
    mrope = {"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    stray = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(DIM // 2)}
    return Layout(config | {"rope_scaling": mrope}, make.tensors | stray, {"angles": plain_angles(DIM, 5e6)})


def deepspec() -> Layout:
    """DeepSpec's copy of the target's configuration: five layers, q/k norms, whole vocabulary, all of its own."""
    make = Maker(22)
    make.eagle3("layers.0.", aux=5, vocab=VOCAB, qk_norm=True)
    make.embedding()
    config = LLAMA | NARROW | {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "attention_bias": False}
    config |= {"layer_types": ["full_attention"], "num_target_layers": LAYERS, "target_layer_ids": [0, 2, 3, 5, 6]}
    config |= {"target_model_name_or_path": "Qwen/Qwen3-4B", "ttt_length": 7, "step_loss_decay": 0.8}
    config |= {"draft_num_hidden_layers": 1, "tie_word_embeddings": False, "use_sliding_window": False}
    config |= {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "max_window_layers": 36}
    truth = {"first": "layers.0.", "taps": (1, 3, 4, 6, 7), "angles": plain_angles(DIM, 1e6)}
    return Layout(config | {"sliding_window": None}, make.tensors, truth)


def eagle1() -> Layout:
    """A head of yuhuili/EAGLE-*: bias in fc, no norm before the first attention, an embedding that is not read."""
    make = Maker(8)
    make.put("fc.weight", H, 2 * H, size=0.02)
    make.tensors["fc.weight"][:, :H] += torch.eye(H)
    make.put("fc.bias", H, size=0.05)
    make.layer("layers.0.", H, echo=False)
    make.put("embed_tokens.weight", VOCAB, H, size=1.0)
    config = LLAMA | NARROW | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pretraining_tp": 1}
    config |= {"rope_scaling": None, "pad_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float16"}
    half = {name: t.half() for name, t in make.tensors.items()}
    return Layout(config, half, {"generation": 1, "taps": "final", "first": "layers.0."}, "bin")


def eagle2() -> Layout:
    """Two layers, no bias in fc but in q, k and v (Qwen2), linear RoPE in the old spelling."""
    make = Maker(9)
    make.put("fc.weight", H, 2 * H, size=0.02)
    make.tensors["fc.weight"][:, :H] += torch.eye(H)
    make.layer("layers.0.", H, echo=False, biases=("q", "k", "v"))
    make.further(1, biases=("q", "k", "v"))
    config = LLAMA | NARROW | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 2}
    config |= {"bias": False, "qkv_bias": True, "rope_theta": 1000000.0}
    config |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    angles = linear_angles(DIM, 1e6, 2.0)
    truth = {"generation": 1, "taps": "final", "layers": 2, "first": "layers.0.", "angles": angles}
    return Layout(config, make.tensors, truth)


LAYOUTS: dict[str, Callable[[], Layout]] = {
    made.__name__: made
    for made in (
        *(
            safeailab,
            safeailab_narrow,
            specforge,
            specforge_wide,
            speculators_llama,
            speculators_qwen3,
            modelopt,
            angelslim,
            deepspec,
        ),
        *(eagle1, eagle2),
    )
}


def taps_of(states: tuple[torch.Tensor, ...], taps: tuple[int, ...] | str) -> np.ndarray:
    """[S, A·Ht] of transformers' hidden states [1, S, Ht], whose last is the one after the final norm."""
    wanted = (len(states) - 1,) if taps == "final" else taps
    return torch.cat([states[b][0] for b in wanted], dim=-1).double().numpy()
