"""Models of published shapes with random weights, heads that match, and the least time a round of them can take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from drafters.eagle3 import Eagle3Head
from drafters.eagle3_spec import Eagle3Spec, default_taps
from drafters.vocab import offsets_of

COPY_BYTES_PER_S = 4.25e12
MATMUL_FLOPS = 790e12
DRAFT_VOCAB = 32_000
_COMMON = {"max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _llama(hidden: int, ffn: int, layers: int, heads: int, dim: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=dim,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        **_COMMON,
    )


SHAPES = {
    "llama-3.1-8b": lambda: _llama(4096, 14336, 32, 32, 128, False),
    "llama-3.2-3b": lambda: _llama(3072, 8192, 28, 24, 128, True),
    "qwen3-8b": lambda: Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        **_COMMON,
    ),
    "tiny": lambda: _llama(256, 512, 8, 16, 64, False),
}


@dataclass(frozen=True)
class Pair:
    """A target, its head, and their sizes."""

    target: PreTrainedModel
    head: Eagle3Head

    def floor_ms(self, rows: int, drafts: int, context: int) -> float:
        """Bytes of weights and KV over the copy rate, or the matmuls' operations over the matmul rate."""
        weights = _matmul_weights(self.target)
        head = _matmul_weights(self.head)
        passes = drafts
        config = self.target.config
        kv_token = 2 * config.num_key_value_heads * config.head_dim * 2
        kv = rows * context * kv_token * (config.num_hidden_layers + passes)
        memory = (2 * weights + 2 * head * passes + kv) / COPY_BYTES_PER_S
        tokens = rows * (drafts + 1)
        compute = 2 * (weights * tokens + head * rows * passes) / MATMUL_FLOPS
        return 1e3 * max(memory, compute)


def _matmul_weights(module: torch.nn.Module) -> int:
    return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, torch.nn.Linear))


def random_pair(shape: str, dtype: torch.dtype, device: torch.device) -> Pair:
    """Build a pair of the shape with random weights on the device."""
    config = SHAPES[shape]()
    torch.manual_seed(0)
    with device:
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        spec = Eagle3Spec(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            draft_vocab_size=DRAFT_VOCAB,
            taps=default_taps(config.num_hidden_layers),
        )
        embedding: torch.Tensor = target.get_input_embeddings().weight  # type: ignore[assignment]
        head = Eagle3Head(spec, embedding, d2t=offsets_of(torch.arange(DRAFT_VOCAB) * 4))
    return Pair(target, head.to(dtype).eval().requires_grad_(False))
