"""What `benchmarks.bench_parallel` measures: published widths with as many layers as are asked for, as folders."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, PreTrainedConfig
from transformers.models.auto import AutoModelForCausalLM

from benchmarks.drawn_weights import write_drawn
from benchmarks.shapes import DRAFT_VOCAB, eagle3_spec, llama_config
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.layout import spec_to_config
from drafters.vocab import mask_of, offsets_of

_COMMON: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_STD, _EMBEDDING_STD, _EXPERT_STD = 0.02, 1.0, 0.002
"""Of matrices, of a mixture's embedding (see `benchmarks.shapes._spread_tokens`), and of an expert's second matrix.

Random routers choose by near ties, which a rounding error decides otherwise for many tokens at once. Small experts
make that a small error: with 0.02 two ranks' logits were 0.26 from the right ones in bfloat16: refused.
"""


def _deepseek_v3(layers: int, experts: int, width: int) -> DeepseekV3Config:
    """The first layer dense, the others mixtures; every size but the vocabulary `width` of the published ones."""
    return DeepseekV3Config(
        vocab_size=129_280 // width,
        hidden_size=7168 // width,
        intermediate_size=18_432 // width,
        moe_intermediate_size=2048 // width,
        num_hidden_layers=layers,
        num_attention_heads=128 // width,
        num_key_value_heads=128 // width,
        q_lora_rank=1536 // width,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128 // min(width, 4),
        v_head_dim=128 // min(width, 4),
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=min(8, experts // 2),
        n_group=min(8, experts // 4),
        topk_group=min(4, experts // 4),
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **_COMMON,
    )


SHAPES: dict[str, tuple[int, Callable[[int, int], PreTrainedConfig]]] = {
    "llama-3.1-8b": (32, lambda layers, experts: llama_config(4096, 14_336, layers, 32, 128, False)),
    "llama-70b": (24, lambda layers, experts: llama_config(8192, 28_672, layers, 64, 128, False)),
    "deepseek-v3": (5, lambda layers, experts: _deepseek_v3(layers, experts, 1)),
    "tiny": (8, lambda layers, experts: llama_config(256, 512, layers, 16, 16, False)),
    "tiny-deepseek-v3": (3, lambda layers, experts: _deepseek_v3(layers, experts, 32)),
}
"""Name -> layers unless others are asked for, and the configuration of (layers, experts)."""


def write_pair(shape: str, layers: int, experts: int, folder: Path) -> tuple[Path, str]:
    """A folder of a target with drawn weights, unless it is there, and what `draft` its head is given as.

    Several processes may do so at once.
    """
    mixture = "deepseek" in shape
    place = folder / (f"{shape}-{layers}" + (f"-{experts}" if mixture else ""))
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=folder))
        config = SHAPES[shape][1](layers, experts)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
        tensors = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        if mixture:
            tensors = _published(tensors)
            tensors |= _module(tensors, layers, config.hidden_size)
        else:
            _write_head(own / "head", config)
        _write(own / "target", tensors, {}, _EMBEDDING_STD if mixture else _STD)
        config.save_pretrained(own / "target")
        try:
            own.rename(place)
        except OSError:  # another process was sooner
            shutil.rmtree(own)
    return place / "target", "mtp" if mixture else str(place / "head")


def _write(
    folder: Path, tensors: dict[str, tuple[int, ...]], stored: dict[str, torch.Tensor], embedding_std: float
) -> None:
    """Matrices are drawn, vectors are ones (norms) and zeros (biases), but for those that are given."""
    drawn = {name: (shape, _std(name, embedding_std)) for name, shape in tensors.items() if len(shape) > 1}
    vectors = {
        name: torch.full(shape, float("bias" not in name), dtype=torch.bfloat16)
        for name, shape in tensors.items()
        if len(shape) == 1
    }
    write_drawn(folder, drawn, vectors | stored)


def _std(name: str, embedding_std: float) -> float:
    if "embed_tokens" in name:
        return embedding_std
    return _EXPERT_STD if ".experts." in name and "down_proj" in name else _STD


def _published(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Experts by name, as in published checkpoints; transformers keeps them in one tensor."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        place, _, part = name.rpartition(".experts.")
        for expert in range(shape[0]) if place else ():
            if part == "gate_up_proj":
                for half in ("gate_proj", "up_proj"):
                    found[f"{place}.experts.{expert}.{half}.weight"] = (shape[1] // 2, shape[2])
            else:
                found[f"{place}.experts.{expert}.{part}.weight"] = shape[1:]
        if not place:
            found[name] = shape
    return found


def _module(tensors: dict[str, tuple[int, ...]], layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Those of the multi-token-prediction module behind the last layer, which is like it."""
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    found = {own + name.removeprefix(last): shape for name, shape in tensors.items() if name.startswith(last)}
    found |= {f"{own}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    return found | {f"{own}eh_proj.weight": (hidden, 2 * hidden)}


def _write_head(folder: Path, config: Any) -> None:
    """An EAGLE-3 head, in the layout of `save_eagle3`."""
    spec = eagle3_spec(config)
    d2t = offsets_of(torch.arange(DRAFT_VOCAB) * (config.vocab_size // DRAFT_VOCAB))
    embedding = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    tensors = {name: tuple(t.shape) for name, t in Eagle3Head(spec, embedding, d2t=d2t).state_dict().items()}
    _write(folder, tensors, {"d2t": d2t, "t2d": mask_of(d2t, spec.vocab_size)}, _STD)
    (folder / "config.json").write_text(json.dumps(spec_to_config(spec, "bfloat16")), encoding="utf-8")
