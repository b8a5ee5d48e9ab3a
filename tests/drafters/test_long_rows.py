"""Rows of very many keys beside short ones, with an EAGLE-3 head and with MLA: tokens and drafts against both oracles.

Prompts are read in chunks by a quick backend (`LongPrompts`), verifications and draft steps by the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import backend_of_ours, enlarge, free_everywhere, random_prompts, wrap
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from attention.backends.reference import TorchBackend, TorchBuilder
from attention.batch.host import HostBatch, slots_of
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV, gather, write
from attention.spec import AttentionSpec
from drafters.base import FINAL_NORM
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpSpec, mtp_target
from drafters.oracle import oracle_drafts
from specdec.requests.sampling import SamplingParams
from tests.oracles import last_position_alone

NEW, DRAFTS, VOCAB, CHUNK = 20, 3, 64, 1024
SHORTS = (5, 40, 17)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 17 * 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Chunks:
    """A batch with rows of more tokens than the reference pads together."""

    host: HostBatch


class ChunkBuilder:
    """Plans rows of up to 16 tokens as the reference does, batches with longer ones without a mask."""

    def __init__(self, plain: TorchBuilder) -> None:
        self._plain = plain

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        long = int(metadata.host.query_lens.max(initial=0)) > 16
        return Chunks(metadata.host) if long else self._plain.build(metadata)


class LongPrompts(TorchBackend):
    """The reference, but chunks of prompts need no [Q, S] mask, which is most of its time at so many keys."""

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> Any:
        return ChunkBuilder(super().builder(group, key, dtype))

    def run(
        self,
        plan: Any,
        key: AttentionSpec,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(plan, Chunks):
            return super().run(plan, key, query, key_states, value_states, layer_kv, metadata, sinks, out)
        tokens, host = len(metadata.slot_mapping), plan.host
        write(layer_kv, key_states[:tokens], value_states[:tokens], metadata.slot_mapping)
        found = query.new_empty(len(query), key.num_q_heads, key.head_dim_v) if out is None else out
        for row, length in enumerate(host.seq_lens.tolist()):
            own = slice(int(host.query_start_loc[row]), int(host.query_start_loc[row + 1]))
            places = slots_of(host.block_table, np.full(length, row), np.arange(length), host.page_size)
            keys = gather(layer_kv.keys, torch.from_numpy(places), layer_kv.layout)
            values = keys[..., : key.head_dim_v]
            if not key.value_in_key:
                values = gather(layer_kv.values, torch.from_numpy(places), layer_kv.layout)
            found[own] = causal(query[own], keys, values, key.scale)
        return found


def causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """query [Q, Hq, Dk], the last of keys [S, Hkv, Dk] and values [S, Hkv, Dv] -> [Q, Hq, Dv].

    The keys before the queries are visible to all of them. One more key after these, whose score is that of the query's
    best own key and whose weight is read off a column of its own, tells the sum of their weights.
    """
    group, before, width = query.shape[1] // keys.shape[1], len(keys) - len(query), values.shape[2]
    q, k, v = (x.transpose(0, 1) for x in (query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)))
    scores = (q @ k[:, before:].mT) * scale  # [Hq, Q, Q]
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    best = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - best)
    total, summed = weights.sum(-1, keepdim=True), weights @ v[:, before:]
    if before:
        size = max(q.shape[2], width) + 1
        q = torch.cat([F.pad(q, (0, size - 1 - q.shape[2])), best / scale], -1)
        k = F.pad(k[:, :before], (0, size - k.shape[2], 0, 1))
        v = F.pad(v[:, :before], (0, size - width, 0, 1))
        k[:, -1, -1] = v[:, -1, -1] = 1
        mean = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale)[0]
        share = mean[..., -1:]
        assert share.min() > 1e-30, "a key before the chunk outweighs the query's own by more than float32 holds"
        total, summed = total + 1 / share - 1, summed + mean[..., :width] / share
    return (summed / total).transpose(0, 1)


def eagle3_pair() -> tuple[Any, Any]:
    """A Llama of one layer with Llama 3's scaled rotary embedding; a head on its embedding and its layer's output."""
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=16, rope_parameters=scaled)).eval().requires_grad_(False)
    enlarge(model, 300)
    sizes = {"hidden_size": 16, "target_hidden_size": 16, "intermediate_size": 24}
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    spec = Eagle3Spec(**sizes, **heads, vocab_size=VOCAB, draft_vocab_size=VOCAB, aux_layers=(0, 1))
    head = Eagle3Head(spec, model.get_input_embeddings().weight).eval().requires_grad_(False)
    enlarge(head, 301)
    look_back(model, "k_proj.weight")
    look_back(head, "k_proj.weight")
    teach(head, model)
    return model, head


def mla_pair() -> tuple[Any, Any]:
    """A DeepSeek-V3 of one dense layer with yarn, and a module of the same kind."""
    scaled = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 17.0, "original_max_position_embeddings": 4096}
    widths = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 16, "v_head_dim": 20, "q_lora_rank": None}
    layers = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(**SIZES, **widths, **layers, rope_parameters=scaled)
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    enlarge(model, 300)
    head = MtpHead(MtpSpec(experts=False), mtp_target(model)).eval().requires_grad_(False)
    enlarge(head, 301)
    look_back(model, "kv_a_proj_with_mqa.weight")
    look_back(head, "kv_a_proj_with_mqa.weight")
    head.eh_proj.weight[:, :16] = torch.eye(16)  # the token's embedding is passed on, and the target is nearly a bigram
    return model, head


def look_back(module: torch.nn.Module, key: str) -> None:
    """Let a query look for what is like itself, above all at its own place: without the newest key all is different.

    The rotated part of queries and keys is the same rotation of the normalised embedding, so no other key has a larger
    product with a query than its own.
    """
    named = dict(module.named_parameters())
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(3))).Q
    for name, weight in named.items():
        if name.endswith("q_proj.weight"):
            own = torch.zeros_like(weight[-16:])
            own[:, :16] = 2.5 * turn
            weight[-16:] = own
            named[name.removesuffix("q_proj.weight") + key][-16:] = own
        if name.endswith("input_layernorm.weight"):
            weight.fill_(1)


def teach(head: Any, model: Any) -> None:
    """Fit the head's output layer to what the target says of random tokens, so that some of its drafts are right."""
    ids = torch.tensor(random_prompts((600,), seed=5, vocab_size=VOCAB)[0])
    tokens, states = model(ids[None]).logits[0].argmax(-1), model.model.embed_tokens(ids)
    outputs: list[torch.Tensor] = []
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    model(ids[None])
    handle.remove()
    hidden = head.fuse(torch.cat([states, outputs[0].reshape(states.shape)], -1))[:-1]
    spec = head.attention_specs[0]

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return causal(query, key, value, spec.scale)

    x = head.norm(head.forward(ids[1:], hidden, torch.arange(len(hidden)), attend))
    right = F.one_hot(tokens[1:], VOCAB).to(x.dtype)
    head.lm_head.weight.copy_(torch.linalg.lstsq(x, right).solution.T)


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {"eagle3": eagle3_pair, "mla": mla_pair}


def own_decoding(model: Any, head: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """NEW tokens by transformers' own forward with its own cache, and the states that the head reads [L, A·H]."""
    states: list[list[torch.Tensor]] = [[] for _ in head.aux_layers]
    decoder = model.get_decoder()
    hooked = {0: decoder.layers[0].register_forward_pre_hook, 1: decoder.layers[0].register_forward_hook}
    hooked[FINAL_NORM] = decoder.norm.register_forward_hook
    handles = []
    for place, layer in enumerate(head.aux_layers):

        def note(module: Any, given: Any, out: Any = None, into: list[torch.Tensor] = states[place]) -> None:
            found = given if out is None else out
            into.append((found[0] if isinstance(found, tuple) else found).reshape(-1, model.config.hidden_size))

        handles.append(hooked[layer](note))
    ids, tokens, cache = torch.tensor([prompt]), [], None
    for _ in range(NEW):
        found = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
        ids = found.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(ids))
    for handle in handles:
        handle.remove()
    return tokens, torch.cat([torch.cat(each) for each in states], -1)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [16_384, pytest.param(65_536, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PAIRS)
@torch.inference_mode()
@pytest.mark.thorough
def test_a_row_of_many_keys_beside_short_ones(name: str, keys: int) -> None:
    """The row's keys pass their number within its first rounds."""
    long = keys - 4
    with torch.inference_mode(False), torch.no_grad():
        model, head = PAIRS[name]()
    prompts = random_prompts((long, *SHORTS), vocab_size=VOCAB // 4)  # what is generated is mostly unlike it
    right = [own_decoding(model, head, prompt) for prompt in prompts]
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": CHUNK, "page_size": 16, "kv_cache_tokens": keys + 1500}
    with backend_of_ours(LongPrompts(torch.device("cpu"))):
        wrapped = wrap(model, head, num_speculative_tokens=DRAFTS, **sizes)
    params = SamplingParams(max_new_tokens=NEW, return_drafts=True)
    completions = wrapped.generate(prompts, params)
    rounds = []
    for prompt, completion, (tokens, states) in zip(prompts, completions, right, strict=True):
        assert completion.token_ids == tokens
        ids, bonus = torch.tensor(prompt + tokens), len(prompt)
        for drafts, round_ in zip(completion.drafts, completion.stats.rounds, strict=True):
            with last_position_alone():
                expected = oracle_drafts(head, ids[: bonus + 1], states[:bonus], len(drafts))
            assert list(drafts) == expected, f"{len(prompt)} prompt tokens, bonus token at {bonus}"
            rounds.append((len(prompt), bonus, round_.accepted))
            bonus += round_.emitted
    of_long = [(bonus, accepted) for length, bonus, accepted in rounds if length == long]
    assert of_long[0][0] < keys < of_long[-1][0], "the row's keys must pass the number"
    assert len(of_long) >= 5 and {0} < {accepted for _, accepted in of_long}, "drafts must be right and wrong"
    assert free_everywhere(wrapped)
