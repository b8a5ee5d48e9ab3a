"""An attention backend that specdec has never heard of: registered here, chosen by name through the public API.

It attends one token at a time, reading its keys and values page by page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fakes import VOCAB, free_everywhere, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from transformers import MistralConfig, MistralForCausalLM

from attention.backends.kinds import KINDS, BackendKind, register
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, LayerKV, write
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec
from specdec.errors import InvalidInputError, UnsupportedModelError
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33, 1, 17))
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
SMALL |= {"num_hidden_layers": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
Keys = list[np.ndarray]
"""For each token of a batch the cache slots of the keys that it sees, [position + 1]."""


class ToyBuilder:
    """Lists, for each token of a batch, the slots of the keys that it sees."""

    def build(self, metadata: CommonAttentionMetadata) -> Keys:
        host: HostBatch = metadata.host
        keys: Keys = []
        for row in range(host.num_reqs):
            places = np.arange(host.seq_lens[row])
            slots = host.block_table[row][places // host.page_size].astype(np.int64) * host.page_size
            slots += places % host.page_size
            first = host.num_computed_tokens[row]
            keys += [slots[: first + i + 1] for i in range(host.query_lens[row])]
        return keys


class ToyBackend:
    """Causal attention with grouped queries."""

    name = "toy"
    batch_invariant = False
    shift = 0
    """Planted: how many of a token's last keys it overlooks."""

    def route(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> str:
        return "one token at a time"

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> ToyBuilder:
        if key.window is not None:
            raise UnsupportedAttentionError("backend 'toy' has no windows")
        return ToyBuilder()

    def run(
        self,
        plan: Keys,
        key: AttentionSpec,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_kv: LayerKV,
        metadata: CommonAttentionMetadata,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        write(layer_kv, key_states, value_states, metadata.slot_mapping)
        out = query.new_empty(len(query), key.num_q_heads, key.head_dim_v) if out is None else out
        page_size = layer_kv.keys.shape[1]
        for token, slots in enumerate(plan):
            at = torch.from_numpy(slots[: max(len(slots) - self.shift, 1)])
            page, place = at // page_size, at % page_size
            keys = layer_kv.keys[page, place].repeat_interleave(key.num_q_heads // key.num_kv_heads, 1)
            values = layer_kv.values[page, place].repeat_interleave(key.num_q_heads // key.num_kv_heads, 1)
            weights = torch.einsum("hd,shd->hs", query[token], keys).mul(key.scale).softmax(-1)
            out[token] = torch.einsum("hs,shd->hd", weights, values)
        return out


@pytest.fixture
def toy() -> Iterator[type[ToyBackend]]:
    """The backend's class, while it is registered."""
    register("toy", BackendKind(lambda device: ToyBackend()))
    yield ToyBackend
    del KINDS["toy"]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.cases(1)
def test_its_tokens_are_the_models_own(toy: Any, drafts: int) -> None:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model) if drafts else None, backend="toy", num_speculative_tokens=drafts)
    assert wrapped.describe()["backend"] == "toy"
    answers = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert [answer.token_ids for answer in answers] == [hf_greedy(prompt, 12) for prompt in PROMPTS]
    assert free_everywhere(wrapped)


@pytest.mark.usefixtures("every_self_test")
def test_the_self_test_refuses_one_that_overlooks_a_key(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "shift", 1)
    with pytest.raises(UnsupportedModelError, match="comes out wrong"):
        wrap(tiny_llama(), backend="toy")


def test_what_it_does_not_offer_is_refused_in_its_own_words(toy: Any) -> None:
    with pytest.raises(UnsupportedAttentionError, match="backend 'toy' has no windows"):
        wrap(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)).eval(), backend="toy")


def test_a_name_is_given_once(toy: Any) -> None:
    with pytest.raises(ValueError, match="there is a backend 'toy' already; names are auto, torch,"):
        register("toy", BackendKind(lambda device: ToyBackend()))
    with pytest.raises(InvalidInputError, match="allowed are auto, torch, flashinfer, flex, batch_invariant, toy"):
        wrap(tiny_llama(), backend="toi")
