"""What a checkpoint's tensor names make of it."""

from __future__ import annotations

import pytest

from drafters.checkpoints.layouts import Layout, detect

LATENT = "self_attn.kv_a_proj_with_mqa.weight"


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        ((f"layers.0.{LATENT}", "embed_tokens.weight", "lm_head.weight"), Layout.UNKNOWN),
        ((f"layers.0.{LATENT}", "fc.weight", "lm_head.weight"), Layout.EAGLE3_MLA),
        ((f"midlayer.{LATENT}", "lm_head.weight"), Layout.EAGLE3_MLA),
    ],
)
def test_latent_attention_alone_makes_no_head(names: tuple[str, ...], layout: Layout) -> None:
    """A target with MLA in a single file, its prefixes stripped, has the same names as a head's layer 0."""
    assert detect({"hidden_size": 64}, dict.fromkeys(names, (64, 64))) is layout
