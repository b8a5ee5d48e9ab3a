"""What cannot work on a GPU is refused with its numbers, and 8-bit caches and memory sizes work there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, random_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.errors import CacheTooSmallError, OutOfDeviceMemoryError, UnsupportedAttentionError
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

CUDA = torch.device("cuda")
PROMPTS = random_prompts((5, 33, 17))


def llama(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> LlamaForCausalLM:
    """Head dim 64, so that FlashInfer serves it."""
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = LlamaConfig(**heads, **sizes, max_position_embeddings=512, eos_token_id=None, pad_token_id=None)
    return LlamaForCausalLM(config).eval().to(CUDA, dtype)


def load(model: Any, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(model, tokenizer=LetterTokenizer(), **options)


def test_head_dim() -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"head dims up to 512; given 576 and 576; use backend='torch'"):
        load(llama(head_dim=576))


def test_page_size() -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"page sizes \(1, 16, 32, 64\); given 8"):
        load(llama(), page_size=8)


def test_float32() -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"float32.*float16 and bfloat16.*backend='torch'"):
        load(llama(torch.float32))


def test_a_request_larger_than_the_cache() -> None:
    model = load(llama(), kv_cache_tokens=112)
    with pytest.raises(
        CacheTooSmallError, match="33 prompt tokens and 90 new ones need 123 cache places; the KV cache has 112"
    ):
        model.generate(PROMPTS, SamplingParams(max_new_tokens=90))
    assert len(model.generate(PROMPTS[0], SamplingParams(max_new_tokens=8))[0].token_ids) == 8


def test_a_cache_larger_than_the_memory() -> None:
    with pytest.raises(
        CacheTooSmallError, match=r"kv_cache_tokens=1000000000 takes 953\.67 GiB \(1024 bytes per token\)"
    ):
        load(llama(), kv_cache_tokens=10**9)


def test_no_room_for_a_cache() -> None:
    with pytest.raises(CacheTooSmallError, match=r"no room for a KV cache.*GiB are free on cuda:0.*0\.001 leaves"):
        load(llama(), gpu_memory_utilization=0.001)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """torch may take 1 % of the memory only, so that it runs out while the GPU has room."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.01)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_running_out_of_memory(little_memory: None) -> None:
    with pytest.raises(OutOfDeviceMemoryError, match=r"ran out of memory while the engine.*3000000 tokens"):
        load(llama(), kv_cache_tokens=3_000_000)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_an_8_bit_cache_generates(cuda_graphs: bool) -> None:
    """Tokens with a cache in 8 bits: FlashInfer's agree with the reference's as long as neither rounds differently."""
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_tokens": 4096, "kv_cache_dtype": "fp8"}
    fast = load(llama(), cuda_graphs=cuda_graphs, **sizes)
    reference = load(llama(), backend="torch", **sizes)
    assert fast.describe()["kv_cache"]["target"].startswith("4,096 tokens in float8_e4m3fn")
    assert "cache float8_e4m3fn" in fast.describe()["attention"]["target"]
    assert abs(fast.self_test_error - reference.self_test_error) < 0.02
    ours, theirs = ([c.token_ids for c in m.generate(PROMPTS, params)] for m in (fast, reference))
    same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(ours, theirs, strict=True)]
    assert sum(same) > 24, f"tokens in common: {same} of 24 each"
