"""Tiny checkpoints in fine-grained FP8, written as the published ones are, and what they must say.

The oracle has neither our operators nor transformers' FP8 layers: plain layers with the weights multiplied out, whose
inputs are rounded to 8 bits and back. It computes in float64: in float32, what is summed in another order may change
the last bit of a value, which 8 bits then round to another neighbour, 6 % away.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fakes import TINY, VOCAB, enlarge
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FP8 = torch.float8_e4m3fn
SCHEME: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
LLAMA: dict[str, Any] = {
    **TINY,
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""Blocks that are whole and cut: 192 columns; q, k, v and gate, up of whole blocks of rows."""
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_hidden_layers": 2}
DEEPSEEK: dict[str, Any] = {
    **TINY,
    **_MOE,
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
QWEN: dict[str, Any] = {**TINY, **_MOE, "model_type": "qwen3_moe", "hidden_size": 128, "num_experts": 4}
_KEPT = ("embed", "lm_head", "norm", "mlp.gate.")
"""Parts that published checkpoints leave as they are."""


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [O, I] -> e4m3 [O, I] and the scale of every block, its largest magnitude over 448, float32."""
    rows, columns = weight.shape
    scale = torch.ones(-(-rows // 128), -(-columns // 128))
    out = torch.empty(rows, columns, dtype=FP8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = weight[place].abs().max().float() / 448
            out[place] = (weight[place].float() / scale[i, j]).to(FP8)
    return out, scale


def multiplied_out(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `quantised`, or of one scale for the whole weight."""
    if scale.numel() == 1:
        return weight.double() * scale.double().flatten()[0]
    blocks = torch.kron(scale.double(), torch.ones(128, 128))
    return weight.double() * blocks[: weight.shape[0], : weight.shape[1]]


def write(folder: Path, sizes: dict[str, Any], seed: int = 0, static: bool = False) -> Path:
    """A checkpoint with random weights; static: one scale a weight and one of its activations."""
    config = AutoConfig.for_model(**sizes)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    enlarge(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.1)  # the last token counts more than the others: drafts of bigrams are right at times
    model.to(torch.bfloat16).save_pretrained(folder)
    file, stored = folder / "model.safetensors", {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in _KEPT):
            stored[name] = tensor
        elif static:
            scale = tensor.abs().max().float() / 448
            stored |= {name: (tensor.float() / scale).to(FP8), f"{name}_scale_inv": scale}
            stored[name.replace("weight", "activation_scale")] = torch.tensor(0.01)
        else:
            stored[name], stored[f"{name}_scale_inv"] = quantised(tensor)
    save_file(stored, file, metadata={"format": "pt"})
    scheme = SCHEME | ({"activation_scheme": "static", "weight_block_size": None} if static else {})
    configure(folder, quantization_config=scheme)
    return folder


def configure(folder: Path, **settings: Any) -> Path:
    """Change settings of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def rewrite(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """Change one tensor of a folder's weights, or leave it out (None)."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, file, metadata={"format": "pt"})
    return folder


def rounded(x: torch.Tensor, static: float | None = None) -> torch.Tensor:
    """Activations [..., I] in 8 bits and back: groups of 128 values of a token, one by one."""
    if static is not None:
        return (x / static).clamp(-448, 448).to(FP8).to(x.dtype) * static
    parts = []
    for part in x.split(128, -1):
        scale = (part.abs().amax(-1, keepdim=True) / 448).float().clamp_min(1e-12)
        parts.append((part / scale).to(FP8).to(x.dtype) * scale)
    return torch.cat(parts, -1)


def reference(folder: Path, sizes: dict[str, Any], static: float | None = None) -> PreTrainedModel:
    """The oracle in float64."""
    tensors = load_file(folder / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).double().eval()
    plain = {}
    for name, tensor in tensors.items():
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            tensor = multiplied_out(tensor, scale)
        if not name.endswith(("scale_inv", "activation_scale")):
            plain[name] = tensor.double()
    plain_folder = folder.parent / f"{folder.name}-plain"
    model.save_pretrained(plain_folder)
    save_file(plain, plain_folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float64).eval()
    quantised_names = {n.removesuffix(".weight_scale_inv") for n in tensors if n.endswith(".weight_scale_inv")}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name in quantised_names:
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0], static),))
        elif name.endswith(".experts"):
            module.forward = _mixed(module)
    return model


def _mixed(experts: Any) -> Callable[..., torch.Tensor]:
    """A mixture token by token, expert by expert."""

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for token in range(len(hidden)):
            for place, expert in enumerate(index[token].tolist()):
                gate, up = (experts.gate_up_proj[expert] @ rounded(hidden[token])).chunk(2)
                inner = experts.act_fn(gate) * up
                out[token] += weights[token, place] * (experts.down_proj[expert] @ rounded(inner))
        return out

    return forward


def greedy(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """What a model's own generate says."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def gaps(oracle: PreTrainedModel, answer: Any) -> torch.Tensor:
    """How far each token of an answer is from the oracle's best, which reads that answer; in its logits' deviations."""
    ids = torch.tensor([answer.prompt_token_ids + answer.token_ids], device=oracle.device)
    with torch.no_grad():
        logits = oracle(ids).logits[0, len(answer.prompt_token_ids) - 1 : -1]
    logits = logits.double().cpu()
    chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    return (logits.max(-1).values - chosen) / logits.std(-1)
