"""Write a Llama target in GGUF as a folder in float32, for a machine whose transformers does not read GGUF.

    python -m benchmarks.gguf_folder MODEL.gguf FOLDER [--tokenizer]

The weights are those that transformers reads from the file: each call prints a hash of names and values, and that of
--tokenizer is of transformers' own model. --tokenizer writes configuration and tokenizer, which takes a transformers
that reads GGUF; the weights alone take the packages gguf and safetensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
HEADS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


def in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads · D, H] whose rotary pairs are neighbours, as llama.cpp stores them -> pairs half a head apart."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def weights_of(file: Path) -> dict[str, np.ndarray]:
    """transformers' name -> float32 weights; a tied lm_head is not among them."""
    reader, found = GGUFReader(file), {}
    for tensor in reader.tensors:
        layer, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if name in HEADS:
            weight = in_halves(weight, int(reader.fields[HEADS[name]].contents()))
        module = OUTER[name] if layer is None else f"model.layers.{layer}.{LAYER[name]}"
        found[f"{module}.weight"] = np.ascontiguousarray(weight)
    return found


def digest(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names and values, in the names' order."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + str(weights[name].dtype).encode() + weights[name].tobytes())
    return found.hexdigest()


def read_by_transformers(file: Path, folder: Path) -> dict[str, np.ndarray]:
    """The model's weights as transformers reads them; its configuration and tokenizer are written to `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**given)
    AutoTokenizer.from_pretrained(**given).save_pretrained(folder)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    for part in (model.config, model.generation_config):
        part.save_pretrained(folder)
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return {name: value.numpy() for name, value in model.state_dict().items() if name not in tied}


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tokenizer", is_flag=True, help="Configuration and tokenizer alone, and what transformers reads.")
def main(file: Path, folder: Path, tokenizer: bool) -> None:
    """Write the folder's weights, or the rest of it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = read_by_transformers(file, folder) if tokenizer else weights_of(file)
    if not tokenizer:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    print(len(weights), "tensors", digest(weights))


if __name__ == "__main__":
    main()
