"""The KV cache in 8 bits: what is stored, what is read back, and what attention makes of it."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.backends.reference import TorchBackend, attend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat, allocate, from_stored, gather, to_stored, write
from attention.errors import InvalidInputError, UnsupportedAttentionError
from attention.runner import GroupRunner
from attention.spec import AttentionSpec

CPU = torch.device("cpu")
KEY = AttentionSpec(4, 2, 16, 16, scale=0.25)
SCALES = ((0.02, 0.05), (0.5, 2.0))
LAYERS = (KEY, replace(KEY, window=7))


def group(
    format: KVFormat, keys: tuple[AttentionSpec, ...] = LAYERS, layout: Literal["NHD", "HND"] = "NHD"
) -> CacheGroup:
    return CacheGroup("target", keys, 9, 4, layout, format)


@given(st.floats(-1e4, 1e4, width=32), st.sampled_from([0.001, 0.5, 1.0, 3.0]))
def test_what_is_read_is_what_was_written_within_an_eighth_of_a_bit(x: float, scale: float) -> None:
    read = float(from_stored(to_stored(torch.tensor([x]), FP8, scale), scale))
    if abs(x) >= 448 * scale:
        assert math.isclose(read, math.copysign(448 * scale, x), rel_tol=1e-6)
    else:
        assert abs(read - x) <= max(abs(x) * 2**-4, 2**-10 * scale) * (1 + 1e-5)


def test_rounding_is_to_nearest_even() -> None:
    ties = torch.tensor([1.0625, 1.1875, 17.0, 19.0])
    assert to_stored(ties, FP8, 1.0).float().tolist() == [1.0, 1.25, 16.0, 20.0]


def test_other_caches_are_as_they_were() -> None:
    states = torch.tensor([0.1, 1e5])
    assert torch.equal(to_stored(states, torch.bfloat16, 0.5), states.bfloat16())
    assert from_stored(states, 0.5) is states


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_slots_of_an_8_bit_cache(layout: Any) -> None:
    layers = allocate(group(KVFormat(FP8, SCALES), layout=layout), torch.bfloat16, CPU)
    slots, states = torch.tensor([6, 19, 4]), torch.randn(2, 3, 2, 16).bfloat16()
    for layer, scales in zip(layers, SCALES, strict=True):
        assert layer.keys.dtype == layer.values.dtype == FP8
        assert (layer.key_scale, layer.value_scale) == scales
        write(layer, states[0], states[1], slots)
        for pages, written, scale in zip((layer.keys, layer.values), states, scales, strict=True):
            expected = (written.float() / scale).clamp(-448, 448).to(FP8).float() * scale
            assert torch.allclose(gather(pages, slots, layout, scale), expected)
        assert int((layer.keys.float() != 0).any(-1).sum()) == 6, "nothing else was written"


def attention(format: KVFormat, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row of 21 tokens -> paged output, dense output over the rounded states, dense output over the exact ones."""
    runner = GroupRunner(TorchBackend(CPU), group(format), torch.float32, CPU)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(21, n, 16, generator=generator) for n in (4, 2, 2))
    batch = rows_batch(np.array([0, 21]), np.array([0]), np.array([[3, 8, 1, 6, 2, 7]], np.int32), 4)
    planned = runner.plan(stage(batch, *single_batch_arena(1, 21, 6, CPU)))
    paged = runner.attend(planned, layer, q, k, v)
    scales = format.of_layer(layer)
    rounded = [from_stored(to_stored(x, FP8, s), s) for x, s in zip((k, v), scales, strict=True)]
    position = torch.arange(21)
    visible = position <= position[:, None]
    window = LAYERS[layer].window
    if window is not None:
        visible &= position > position[:, None] - window

    def dense(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return attend(heads[0], heads[1], heads[2], visible[None, None], LAYERS[layer])[0].transpose(0, 1)

    return paged, dense(*rounded), dense(k, v)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("scales", [(), SCALES])
def test_attention_over_8_bits_is_attention_over_the_rounded_states(scales: Any, layer: int) -> None:
    paged, rounded, exact = attention(KVFormat(FP8, scales), layer)
    assert relative(paged, rounded) < 1e-6
    assert 1e-3 < relative(paged, exact) < 0.06


def test_the_comparison_sees_scales_of_another_layer() -> None:
    _, rounded, _ = attention(KVFormat(FP8, SCALES), 0)
    other, _, _ = attention(KVFormat(FP8, SCALES[::-1]), 0)
    assert relative(other, rounded) > 1e-3


def test_an_8_bit_cache_takes_half_or_a_quarter() -> None:
    def size(format: KVFormat, dtype: torch.dtype) -> int:
        return sum(t.nbytes for layer in allocate(group(format), dtype, CPU) for t in (layer.keys, layer.values))

    assert size(KVFormat(FP8), torch.bfloat16) * 2 == size(KVFormat(), torch.bfloat16)
    assert size(KVFormat(FP8), torch.float32) * 4 == size(KVFormat(), torch.float32)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.float8_e5m2}, r"float8_e5m2: allowed are the model's dtype and torch.float8_e4m3fn"),
    "scales alone": ({"scales": SCALES}, "scales are for an fp8 cache"),
    "zero": ({"dtype": FP8, "scales": ((1.0, 0.0),)}, r"layer 0: \(1.0, 0.0\); allowed are two positive numbers"),
    "not finite": ({"dtype": FP8, "scales": ((1.0, 1.0), (math.inf, 1.0))}, "layer 1"),
    "one number": ({"dtype": FP8, "scales": ((1.0,),)}, "allowed are two positive numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_formats_that_are_none(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(InvalidInputError, match=message):
        KVFormat(**options)


def test_scales_of_other_layers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="scales of 2 layers were given; group target has 1"):
        group(KVFormat(FP8, SCALES), (KEY,))


def test_latents_in_8_bits_are_refused() -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"MLA has no cache in 8 bits.*kv_cache_dtype='auto'"):
        group(KVFormat(FP8), (AttentionSpec(4, 1, 24, 16, 0.2, value_in_key=True),))


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_pages_take_no_memory_before_they_are_written() -> None:
    before = resident_bytes()
    layers = (AttentionSpec(4, 2, 64, 64, scale=0.25),)
    groups = [CacheGroup("target", layers, 1 << 14, 16, "NHD", KVFormat(dtype)) for dtype in (None, FP8)]
    kinds = ((torch.float32, groups[0]), (torch.bfloat16, groups[0]), (torch.bfloat16, groups[1]))
    made = [allocate(each, dtype, CPU)[0].keys for dtype, each in kinds]
    # Half: other threads of the process take memory meanwhile.
    assert resident_bytes() - before < sum(each.nbytes for each in made) // 2
    assert all(not each[-1].float().any() and each.is_contiguous() for each in made)
