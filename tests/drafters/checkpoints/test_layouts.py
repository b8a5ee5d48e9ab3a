"""What a checkpoint's tensor names make of it."""

from __future__ import annotations

import pytest

from drafters.checkpoints.layouts import Layout, detect

MLA = {"layers.0.self_attn.kv_a_proj_with_mqa.weight": (40, 64)}


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        ({"embed_tokens.weight": (96, 64), "norm.weight": (64,), "lm_head.weight": (96, 64)}, Layout.UNKNOWN),
        ({"fc.weight": (64, 192), "lm_head.weight": (96, 64)}, Layout.EAGLE3_MLA),
        ({"midlayer.input_layernorm.weight": (64,)}, Layout.EAGLE3_MLA),
    ],
)
def test_latent_attention_alone_makes_no_head(more: dict[str, tuple[int, ...]], layout: Layout) -> None:
    """A target with MLA in a single file, its prefixes stripped, has the same names as a head's layer 0."""
    assert detect({"hidden_size": 64}, MLA | more) is layout
