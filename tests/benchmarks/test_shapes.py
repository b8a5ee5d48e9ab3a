"""Shapes with several modules: what they are made of, and what a round of them costs at least."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from attention.hf.probe import probe
from attention.recurrence.states import DeltaSpec, StateGroup
from benchmarks.shapes import COPY_BYTES_PER_S, MODULES, SHAPES, random_pair
from drafters.mtp.head import MtpHead, MtpStack

CPU = torch.device("cpu")


def test_every_shape_with_modules_is_a_shape() -> None:
    assert set(MODULES) <= set(SHAPES) and {
        MODULES[f"{s}-2-modules"] for s in ("llama-3.1-8b", "deepseek-v2-lite")
    } == {2}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-deepseek"])
@pytest.mark.cases(1)
def test_a_pair_with_two_modules(shape: str) -> None:
    pair = random_pair(f"{shape}-2-modules", torch.float32, CPU)
    assert isinstance(pair.head, MtpStack) and pair.num_modules == len(pair.head.mtp_modules) == 2
    assert len(pair.head.attention_specs) == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_the_floor_counts_one_pass_of_the_second_module() -> None:
    """Of one draft there is none; of three, its matmul weights and its keys and values are read once more."""
    one, two = (random_pair(shape, torch.float32, CPU) for shape in ("tiny-deepseek", "tiny-deepseek-2-modules"))
    assert isinstance(one.head, MtpHead) and one.cache_bytes == two.cache_bytes
    sequences, context = [[*range(3, 43)]], 30
    for drafts, passes in ((1, 0), (3, 1)):
        experts = two.experts(sequences, drafts, 16)
        own = sum(m.weight.numel() for m in one.head.modules() if isinstance(m, torch.nn.Linear))
        more = passes * (2 * (own + experts[1].weights) + context * two.cache_bytes[1])
        floors = [pair.floor_ms(1, drafts, context, experts) for pair in (one, two)]
        assert floors[1] - floors[0] == pytest.approx(1e3 * more / COPY_BYTES_PER_S)


def test_the_hybrid_shape_is_transformers_default() -> None:
    """The numbers of the reference page: 24 layers of the gated delta rule, 8 of attention."""
    config = SHAPES["qwen3.5-9b"]()
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (4096, 12_288, 248_320)
    assert [config.layer_types.count(kind) for kind in ("linear_attention", "full_attention")] == [24, 8]
    assert (config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim) == (16, 32, 128)
    assert MODULES["qwen3.5-9b"] == 1


def test_the_floor_of_a_hybrid_counts_its_states() -> None:
    """By hand: three layers with 4x16x16 states, keys of 2 (transformers 5.17: 4) heads, 128 channels of 4 taps."""
    pair = random_pair("tiny-qwen3.5", torch.bfloat16, CPU)
    assert isinstance(pair.head, MtpHead) and len(pair.head.attention_specs) == 1
    (heads,) = {c.spec.num_k_heads for c in probe(pair.target).recurrent_calls if isinstance(c.spec, DeltaSpec)}
    state, ring = 4 * 16 * 16 * 4, (heads * 16 + 4 * 16) * 2 + 4 * 2 * 4
    for drafts, accepted in ((0, 0.0), (3, 1.5)):
        conv = (3 + drafts + 1) * 128 * 2
        moved = 3 * (2 * state + (drafts + accepted) * ring + conv)
        assert pair.state_bytes(drafts, accepted) == moved
        experts = pair.experts([[1] * 40], drafts, 16)
        floors = [pair.floor_ms(rows, drafts, 0, experts, accepted) for rows in (1, 5)]
        assert floors[1] - floors[0] == pytest.approx(1e3 * 4 * moved / COPY_BYTES_PER_S)


def test_a_row_of_qwen3_next_keeps_one_state_per_layer() -> None:
    """79 MiB for K=3, and not 288 as with a state for every token: four layers of the published shape, on no device."""
    config = Qwen3NextConfig(num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3], vocab_size=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    specs = tuple(call.spec for call in probe(model).recurrent_calls)
    mib = {k: 12 * StateGroup(specs, 2, k).bytes_per_row(torch.bfloat16) / 2**20 for k in (0, 3)}
    assert mib[3] == pytest.approx(79, rel=0.05)
    states = 12 * sum(4 * 32 * 128 * 128 for spec in specs if isinstance(spec, DeltaSpec)) / 2**20
    assert (states, 4 * states) == (72, 288)
    assert states < mib[0] < mib[3] < 1.16 * states
