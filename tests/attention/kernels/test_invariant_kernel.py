"""Batch-invariant attention with each of its options in Triton's interpreter: small heads, at the edges of tiles."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/attention/test_backends.py runs the kernel compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.backends.invariant import InvariantBuilder, run_invariant
from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import FP8, KVFormat, write
from attention.kernels import invariant_kernel
from attention.spec import AttentionSpec
from tests.attention.batches import Batch
from tests.attention.oracle import Rig, Variant

CPU = torch.device("cpu")
PLAIN = AttentionSpec(4, 2, 16, 16, 0.25)
WIDE = AttentionSpec(4, 2, 24, 16, 0.2)
EDGES = Batch((1, 4, 16, 17), (127, 125, 113, 113))
"""128 to 130 keys in tiles of 128; queries that fill a tile of 32 with two heads each, the last of which sees the first
key of a tile; and one more."""


def attended(given: Rig, **changed: Any) -> torch.Tensor:
    """[T, Hq, Dv]; the reference writes what the interpreter would cut off. changed: of the layer."""
    (layer,) = given.runner(TorchBackend(CPU)).layers
    query, keys, values = given.new_states()
    metadata = given.metadata()
    plan = InvariantBuilder().build(metadata)
    with patch(
        "attention.kernels.cache_write.write_kv", lambda layer, k, v, s: write(layer, k[: len(s)], v[: len(s)], s)
    ):
        return run_invariant(plan, given.key, query, keys, values, replace(layer, **changed), metadata, given.sinks)


@pytest.mark.parametrize(
    "variant",
    [
        Variant(PLAIN),
        Variant(replace(PLAIN, window=9), layout="HND"),
        Variant(replace(PLAIN, window=128)),
        Variant(replace(PLAIN, softcap=3.0)),
        Variant(replace(PLAIN, has_sinks=True)),
        Variant(WIDE, layout="HND"),
        Variant(replace(WIDE, num_q_heads=6), 8, format=KVFormat(FP8, ((0.5, 0.125),))),
    ],
    ids=["plain", "window", "wide window", "softcap", "sinks", "wide keys", "8 bits"],
)
def test_every_option_at_the_edges_of_tiles(variant: Variant) -> None:
    given = Rig(variant, EDGES, torch.float16, CPU)
    if given.sinks is not None:
        given.sinks += torch.tensor([8, 0, -8, 2])  # above all scores, among them, and below
    assert given.errors(attended(given))[1] <= 1e-3


def test_tiles_of_keys_begin_at_fixed_places_whatever_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the order of a token's sums does not depend on how many drafts stand before it; tests/gpu compares bits, which
    the interpreter's matmul does not keep."""
    begins, plain = set[int](), invariant_kernel.key_places

    def noted(page_indices_ptr: Any, first_page: Any, position: Any, *others: Any) -> Any:
        begins.add(int(position.handle.data[0]))
        return plain(page_indices_ptr, first_page, position, *others)

    monkeypatch.setattr(invariant_kernel, "key_places", noted)
    attended(Rig(Variant(replace(PLAIN, window=40)), Batch((1, 6, 20), (400, 399, 170)), torch.float16, CPU))
    assert begins == {128, 256, 384}
