"""Models of published shapes with random weights, heads that match, and the least time a round of them can take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from attention.cache.kv_cache import bytes_per_token
from attention.hf.probe import Probe, probe
from attention.recurrence.states import ConvSpec, RecurrenceSpec, fold_rule
from benchmarks.fp8_weights import fp8_weights, quantise
from benchmarks.mxfp4_weights import draw_mxfp4
from benchmarks.routing import ExpertWork, HeldRoutes, expert_work
from drafters.assistant.head import AssistantHead
from drafters.block.head import BlockParallelHead
from drafters.block.spec import BlockSpec
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec, default_aux_layers
from drafters.mtp.head import MtpHead, MtpStack
from drafters.mtp.spec import MtpSpec, mtp_target
from drafters.vocab import offsets_of

COPY_BYTES_PER_S = 4.25e12
MATMUL_FLOPS = 790e12
DRAFT_VOCAB = 32_000
_COMMON = {"max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama_config(hidden: int, ffn: int, layers: int, heads: int, dim: int, tied: bool) -> LlamaConfig:
    """Llama 3's vocabulary and rotary embedding, with 8 KV heads."""
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


def _deepseek_v2(hidden: int, ffn: int, layers: int, heads: int, experts: int, expert_ffn: int) -> DeepseekV2Config:
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
    return DeepseekV2Config(
        vocab_size=102_400,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=experts,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=expert_ffn,
        first_k_dense_replace=1,
        rope_parameters=yarn | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        **(_COMMON | {"max_position_embeddings": 163_840}),
    )


SHAPES = {
    "llama-3.1-8b": lambda: llama_config(4096, 14336, 32, 32, 128, False),
    "llama-3.2-3b": lambda: llama_config(3072, 8192, 28, 24, 128, True),
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
    "deepseek-v2-lite": lambda: _deepseek_v2(2048, 10_944, 27, 16, 64, 1408),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        **_COMMON,
    ),
    "gpt-oss-20b": lambda: GptOssConfig(num_local_experts=32, num_hidden_layers=24, **_COMMON),
    "qwen3-next-80b": lambda: Qwen3NextConfig(**_COMMON),  # transformers' defaults are its sizes
    "qwen3.5-9b": Qwen3_5TextConfig,  # 32 layers, 24 of them with the gated delta rule; transformers' default
    "tiny": lambda: llama_config(256, 512, 8, 16, 64, False),
    "tiny-deepseek": lambda: _deepseek_v2(256, 512, 4, 4, 16, 128),
    "tiny-qwen3.5": lambda: Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}
MODULES = {"deepseek-v2-lite": 1, "qwen3-next-80b": 1, "qwen3.5-9b": 1, "tiny-deepseek": 1, "tiny-qwen3.5": 1}
"""Shapes whose head is that many multi-token-prediction modules; the others have an EAGLE-3 head."""
for _shape in ("llama-3.1-8b", "deepseek-v2-lite", "tiny", "tiny-deepseek"):
    SHAPES[f"{_shape}-2-modules"], MODULES[f"{_shape}-2-modules"] = SHAPES[_shape], 2
DRAFT_MODELS = {"llama-3.1-8b-with-1b": "llama-3.2-1b", "tiny-with-a-model": "tiny"}
"""Shapes whose head is a small draft model, and its shape."""
SHAPES["llama-3.2-1b"] = lambda: llama_config(2048, 8192, 16, 32, 64, True)
SHAPES["llama-3.1-8b-with-1b"], SHAPES["tiny-with-a-model"] = SHAPES["llama-3.1-8b"], SHAPES["tiny"]
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 16, "slots": "fill-in"},
    "dspark": {"block_size": 7, "slots": "anchor-first", "markov": "vanilla", "markov_rank": 256},
}
"""Heads with five layers and five aux states that draft a block, as published for Qwen3-8B; the lm_head is the
target's. A shape's name ends with one of these."""
for _shape in ("qwen3-8b", "tiny"):
    for _block in BLOCKS:
        SHAPES[f"{_shape}-{_block}"] = SHAPES[_shape]


@dataclass(frozen=True)
class Pair:
    """A target, its head, and their sizes. routes: of its mixtures, where they are held."""

    target: PreTrainedModel
    head: Eagle3Head | MtpHead | MtpStack | AssistantHead | BlockParallelHead
    routes: HeldRoutes | None = None

    @property
    def num_modules(self) -> int:
        """M multi-token-prediction modules that take turns; 1 of any other head."""
        return len(self.head.mtp_modules) if isinstance(self.head, MtpStack) else 1

    @cached_property
    def _probe(self) -> Probe:
        return probe(self.target)

    @cached_property
    def cache_bytes(self) -> tuple[int, int]:
        """Cache bytes a token of the target's layers, and of those that a pass of the head reads."""
        calls = self._probe.calls
        keys = tuple(call.attention_spec for call in calls), _module(self.head).attention_specs
        return bytes_per_token(keys[0], self.target.dtype), bytes_per_token(keys[1], self.target.dtype)

    def state_bytes(self, drafts: int, accepted: float) -> float:
        """Bytes of a row's recurrent states that a round moves, `accepted` of `drafts` accepted the round before."""
        specs = tuple(call.spec for call in self._probe.recurrent_calls)
        return bytes_per_launch(specs, drafts, accepted, self.target.dtype)

    def experts(self, sequences: list[list[int]], drafts: int, new_tokens: int) -> tuple[ExpertWork, ...]:
        """Experts at work in a round: in the verification, in a pass of the draft prefill, and in a further step.

        Counted on the last `new_tokens` of every sequence, see `expert_work`. The head's router was not asked:
        its layer is taken to choose as the target's layers do on average.
        """
        if self.routes is not None:
            verify, step = (self.routes.work(len(sequences) * width) for width in (drafts + 1, 1))
        else:
            verify, step = (expert_work(self.target, sequences, width, new_tokens) for width in (drafts + 1, 1))
        layers = max(verify.layers, 1)
        return verify, verify.scaled(1 / layers), step.scaled(1 / layers)

    def floor_ms(
        self, rows: int, drafts: int, context: float, experts: tuple[ExpertWork, ...], accepted: float = 0.0
    ) -> float:
        """Bytes of weights, KV and recurrent states over the copy rate, or the matmuls' operations over theirs.

        context: keys a row, the mean of uneven rows. accepted: drafts of a row that were accepted on average; only
        recurrent states depend on it. Operations of attention and of recurrences do not count: with 6 tokens and 4
        query heads a KV head, attention's are 24 for each byte read, where a GPU makes 186. Of experts, only the
        weights of those that were chosen count. Weights in FP8 are a byte each, and their scales four. Every draft is a
        pass of the head, and each later one of several modules has a pass more, in the draft prefill; of that only
        memory counts. A block is one pass of its head, of all slots.
        """
        verify, first, step = experts
        steps, others = max(drafts - 1, 0), max(min(self.num_modules, drafts) - 1, 0)
        dense, head = _matmul_weights(self.target), _head_weights(self.head)
        in_fp8, scales = fp8_weights(self.target)
        of_target, of_head = self.cache_bytes
        passes, tokens = drafts, rows * (drafts + 1)
        of_pass = rows * drafts
        if drafts and isinstance(self.head, BlockParallelHead):
            passes, of_pass = 1, rows * self.head.block_size
        chosen = verify.weights + ((1 + others) * first.weights + steps * step.weights if drafts else 0)
        read = dense + head * passes + _matmul_weights(_module(self.head)) * others + chosen
        narrow = 0.0 if self.routes is None else (2 - self.routes.bytes_a_weight) * verify.weights
        keys = context * (of_target + of_head * (passes + others))
        memory = 2 * read - in_fp8 - narrow + 4 * scales + rows * (keys + self.state_bytes(drafts, accepted))
        routed = verify.weights_a_token * tokens + (first.weights_a_token * rows * drafts if drafts else 0)
        # in 8 bits tensor cores make twice as many operations
        compute = 2 * ((dense - in_fp8 / 2) * tokens + head * of_pass + routed)
        return 1e3 * max(memory / COPY_BYTES_PER_S, compute / MATMUL_FLOPS)


def bytes_per_launch(specs: Sequence[RecurrenceSpec], drafts: int, accepted: float, dtype: torch.dtype) -> float:
    """Bytes a row over all recurrent calls of a launch that verifies `drafts` drafts.

    A state is read and written once. Launches that put storing off (`FoldRule`) write it less often: these are the
    bytes of a rule without that, which all results compare with. Of the ring beside it, the inputs of the drafts that
    the round before accepted are read, and those of this launch's drafts written. Of a convolution's ring, the width-1
    inputs before the launch are read, and those of its drafts and of its first token written.

    Qwen3-Next-80B (36 layers), K=3, two drafts accepted, bfloat16: the states alone are 2·72 MiB.

    >>> from attention.recurrence.states import DeltaSpec
    >>> layer = [ConvSpec(8192, 4), DeltaSpec(16, 32, 128, 128, False)]
    >>> [round(36 * bytes_per_launch(layer, k, a, torch.bfloat16) / 2**20, 1) for k, a in ((0, 0), (3, 2))]
    [146.2, 150.1]
    """
    return sum(_bytes(spec, drafts, accepted, dtype) for spec in specs)


def _bytes(spec: RecurrenceSpec, drafts: int, accepted: float, dtype: torch.dtype) -> float:
    if isinstance(spec, ConvSpec):
        return (spec.width - 1 + drafts + 1) * spec.channels * dtype.itemsize
    rule = fold_rule([spec], drafts)
    sizes = {name: math.prod(dims) * kind.itemsize for name, (dims, kind) in spec.shapes(rule, dtype).items()}
    state = sizes.pop("state")
    return 2 * state + (accepted + drafts) * sum(sizes.values()) / rule.ring_size


def _matmul_weights(module: torch.nn.Module) -> int:
    return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, torch.nn.Linear))


def _module(head: Any) -> Eagle3Head | MtpHead | AssistantHead | BlockParallelHead:
    """What runs in one pass of the head."""
    return head.first if isinstance(head, MtpStack) else head


def _head_weights(head: Any) -> int:
    """Weights that one draft, or block, reads; MTP modules and blocks read the target's lm_head."""
    own = _module(head)
    shared = own.target_lm_head if isinstance(own, (MtpHead, BlockParallelHead)) else None
    return _matmul_weights(own) + (0 if shared is None else shared.numel())


def random_pair(
    shape: str,
    dtype: torch.dtype,
    device: torch.device,
    weights: str = "model",
    layers: int | None = None,
    held_tokens: int = 0,
) -> Pair:
    """Build a pair of the shape with random weights on the device: MTP modules, a model or a block where MODULES,
    DRAFT_MODELS or BLOCKS has it, else EAGLE-3.

    weights: "model", the target's are of `dtype`; "fp8", those of its linear layers and experts are in fine-grained
    FP8, but for the lm_head, as in published checkpoints; "mxfp4", those of its experts. The head's are of `dtype`.
    layers: fewer than the shape has. held_tokens: of the largest pass, to hold its mixtures' routes (`HeldRoutes`).
    """
    config, modules = SHAPES[shape](), MODULES.get(shape, 0)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    torch.manual_seed(0)
    with device:
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        if isinstance(config, DeepseekV2Config):
            _spread_tokens(target)
        if weights == "fp8":
            quantise(target)
        elif weights == "mxfp4":
            draw_mxfp4(target)
        heads: list[Any] = [mtp_head(target) for _ in range(modules)]
        if shape in DRAFT_MODELS:
            small = AutoModelForCausalLM.from_config(SHAPES[DRAFT_MODELS[shape]](), dtype=dtype)
            heads.append(AssistantHead(small.eval().requires_grad_(False)))
        heads += [block_head(target, config, own) for name, own in BLOCKS.items() if shape.endswith(name)]
        head = MtpStack(heads) if modules > 1 else heads[0] if heads else _eagle_head(target, config)
    routes = HeldRoutes.of(target, head, held_tokens) if held_tokens else None
    return Pair(target, head.eval().requires_grad_(False), routes)


def _spread_tokens(target: PreTrainedModel) -> None:
    """Embeddings of unit variance. With those of 0.02 that transformers draws, what a row's tokens get from attention
    outweighs what tells them apart, and routers send them all to the same experts."""
    torch.nn.init.normal_(target.get_input_embeddings().weight)  # type: ignore[arg-type]


def mtp_head(target: PreTrainedModel) -> MtpHead:
    """The rotary frequencies stay float32."""
    head = MtpHead(MtpSpec(), mtp_target(target))
    for parameter in head.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.02)
        parameter.data = parameter.data.to(target.dtype)
    return head


def _sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Of a head that is as wide as its target."""
    return {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
    }


def eagle3_spec(config: PreTrainedConfig) -> Eagle3Spec:
    """A head of the target's own sizes, on a draft vocabulary of DRAFT_VOCAB."""
    return Eagle3Spec(
        **_sizes(config),
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=default_aux_layers(config.num_hidden_layers),
    )


def block_head(target: PreTrainedModel, config: PreTrainedConfig, kind: dict[str, Any]) -> BlockParallelHead:
    """A head of the target's own sizes; kind: see BLOCKS."""
    last = config.num_hidden_layers - 3
    spec = BlockSpec(
        **_sizes(config),
        draft_vocab_size=config.vocab_size,
        aux_layers=tuple(1 + round(i * last / 5) for i in range(1, 6)),
        qk_norm=True,
        num_layers=5,
        own_lm_head=False,
        mask_token_id=config.vocab_size - 1,
        **kind,
    )
    shared: list[torch.Tensor] = [target.get_input_embeddings().weight, target.get_output_embeddings().weight]  # type: ignore[assignment, union-attr, list-item]
    return BlockParallelHead(spec, *shared).to(target.dtype)


def _eagle_head(target: PreTrainedModel, config: PreTrainedConfig) -> Eagle3Head:
    spec = eagle3_spec(config)
    embedding: torch.Tensor = target.get_input_embeddings().weight  # type: ignore[assignment]
    return Eagle3Head(spec, embedding, d2t=offsets_of(torch.arange(DRAFT_VOCAB) * 4)).to(target.dtype)
