"""Quantised checkpoints on a GPU: from graphs where the compiler takes their layers, else a warning names them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import random_prompts, table_head, wrap
from transformers import AutoModelForCausalLM, Mxfp4Config

from specdec import SamplingParams, SpecdecWarning
from tests.quantised import make, mxfp4, own_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
PROMPTS = random_prompts((7, 3, 11))
NAMES = (
    *("compressed-tensors int4", "compressed-tensors fp8", "torchao int8"),
    *("quanto int8", "bitsandbytes nf4", "bitsandbytes int8"),
)


def tokens(wrapped: Any) -> list[list[int]]:
    return [c.token_ids for c in wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=16))]


@pytest.mark.parametrize("name", NAMES)
def test_graphs_or_a_reason(name: str, tmp_path: Path) -> None:
    """float32, so that graphs must say what rounds without them say; the head is right now and then."""
    folder = make(name, tmp_path / "target")
    head = table_head(own_model(folder), 0.1, aux_layers=(1, 2, 3), dim=16).cuda()  # of a size that Flex takes
    head.table, head.target_ids, head.fuse_weight = head.table.cuda(), head.target_ids.cuda(), head.fuse_weight.cuda()
    head.qkv, head.mix = head.qkv.cuda(), head.mix.cuda()
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "backend": "flex", "page_size": 16}
    with wrap(folder, **options) as plain:
        said = tokens(plain)
    with wrap(folder, head, num_speculative_tokens=3, **options) as drafted:
        assert tokens(drafted) == said


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_from_graphs_or_a_reason(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "target")
    dtype = torch.float16
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wrapped = wrap(folder, dtype=dtype, device="cuda", page_size=16)
    with wrapped:
        state, found = wrapped.graphs, wrapped.describe()["quantisation"]
        assert all(len(ids) == 16 for ids in tokens(wrapped))
    words = [str(w.message) for w in said if issubclass(w.category, SpecdecWarning)]
    assert found is not None
    assert state == "on" or sum("runs without CUDA graphs" in text for text in words) == 1
    print(f"{name}: graphs {state}; {found['layers']}; {found['runs']}")


def test_gpt_oss_stays_in_four_bits(tmp_path: Path) -> None:
    """From graphs, in a fifth of the memory; the tokens are those of the weights multiplied out, up to near ties."""
    mxfp4(tmp_path, hidden_size=256, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, head_dim=64)
    with wrap(tmp_path, dtype=torch.bfloat16, device="cuda", page_size=16, cuda_graphs=True) as packed:
        found, facts = tokens(packed), packed.describe()
    assert facts["quantisation"]["runs"] == "as stored" and facts["graphs"]["state"] == "on"
    dense = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).cuda()
    with wrap(dense, page_size=16) as plain:
        right = tokens(plain)
        assert facts["weights_bytes"] < 0.6 * plain.describe()["weights_bytes"]
    same = sum(a == b for ours, own in zip(found, right, strict=True) for a, b in zip(ours, own, strict=True))
    assert same >= 24, f"{same} of 48 tokens alike"
