"""The rotary embedding of draft heads against that of transformers' Llama, and its float32 in a half-precision head."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafters.errors import HeadLoadError
from drafters.rope import RopeSpec, Rotary, rotate

LLAMA3 = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 16),
)
SPECS = [
    RopeSpec(theta=5e5),
    RopeSpec(kind="linear", max_positions=64, scaling=(("factor", 2.0),)),
    RopeSpec(kind="llama3", max_positions=64, scaling=LLAMA3),
    RopeSpec(kind="yarn", max_positions=64, scaling=(("factor", 4.0),)),
]
POSITIONS = torch.tensor([0, 1, 17, 63, 200])
DIM = 16


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rotations_are_those_of_transformers(spec: RopeSpec) -> None:
    parameters = {"rope_type": spec.kind, "rope_theta": spec.theta, **dict(spec.scaling)}
    config = LlamaConfig(head_dim=DIM, max_position_embeddings=spec.max_positions, rope_parameters=parameters)
    query = torch.randn(len(POSITIONS), 3, DIM)
    cos, sin = LlamaRotaryEmbedding(config)(query, POSITIONS[None])
    theirs, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin)
    ours = rotate(query, *Rotary(spec, DIM, torch.device("cpu"))(POSITIONS))
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_frequencies_stay_float32_when_a_head_is_cast() -> None:
    """In half precision, positions 4096 and 4097 would be rotated alike."""
    rotary = Rotary(RopeSpec(), DIM, torch.device("cpu"))
    before = rotary(torch.tensor([4096, 4097]))
    after = rotary.to(torch.bfloat16)(torch.tensor([4096, 4097]))
    assert rotary.frequencies.dtype is torch.float32
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not torch.allclose(after[0][0], after[0][1], atol=1e-2)


def test_a_rotated_head_keeps_its_dtype_and_length() -> None:
    x = torch.randn(5, 2, DIM)
    rotated = rotate(x, *Rotary(RopeSpec(), DIM, torch.device("cpu"))(POSITIONS))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[0], x[0]), "position 0 is not rotated"
    assert rotate(x.half(), *Rotary(RopeSpec(), DIM, torch.device("cpu"))(POSITIONS)).dtype is torch.float16


@pytest.mark.parametrize(
    ("spec", "words"),
    [(RopeSpec(kind="longrope"), "'longrope' of this head is not among"), (RopeSpec(kind="linear"), "are incomplete")],
)
def test_what_cannot_be_computed_is_refused(spec: RopeSpec, words: str) -> None:
    with pytest.raises(HeadLoadError, match=words):
        spec.frequencies(DIM)
