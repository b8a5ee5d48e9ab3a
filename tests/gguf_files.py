"""GGUF files of tiny random Llamas, written by the package `gguf` as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaForCausalLM

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def written(
    model: LlamaForCausalLM,
    path: Path,
    kind: str = "Q8_0",
    architecture: str = "llama",
    tokens: str = "",
    without: str = "-",
    parts: int = 0,
) -> Path:
    """Write a model. kind: ggml's type of its matrices; what has no whole blocks of 32 is F32.

    tokens: of a tokenizer of one character each, none without; the last two are a space and a merge. without: a tensor
    whose name has this is left out. parts: of how many files this one claims to be.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if parts:
        writer.add_uint16("split.count", parts)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*tokens[:-2], "Ġ", tokens[:2]])
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges([" ".join(tokens[:2])])
        writer.add_eos_token_id(0)
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    stored = GGMLQuantizationType[kind]
    for name, numbers in tensors(model).items():
        if without in name:
            continue
        blocks = numbers.ndim > 1 and numbers.shape[-1] % 32 == 0
        how = stored if blocks or kind in ("F16", "BF16") else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(numbers, how), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray[Any, Any]]:
    """A model's tensors by their names in GGUF, rows of queries and keys in llama.cpp's order."""
    found = {}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        place = name.removesuffix(".weight")
        numbers = tensor.float().numpy()
        if place in OUTER:
            found[f"{OUTER[place]}.weight"] = numbers
            continue
        _, _, layer, rest = place.split(".", 3)
        own = LAYER[rest]
        if own in heads:  # the two halves of the rotary embedding, interleaved
            halves = numbers.reshape(heads[own], 2, -1, numbers.shape[1])
            numbers = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
        found[f"blk.{layer}.{own}.weight"] = numbers
    return found
