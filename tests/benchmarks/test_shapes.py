"""Shapes with several modules: what they are made of, and what a round of them costs at least."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shapes import COPY_BYTES_PER_S, MODULES, SHAPES, random_pair
from drafters.mtp.head import MtpHead
from drafters.mtp.stack import MtpStack

CPU = torch.device("cpu")


def test_every_shape_with_modules_is_a_shape() -> None:
    assert set(MODULES) <= set(SHAPES) and {
        MODULES[f"{s}-2-modules"] for s in ("llama-3.1-8b", "deepseek-v2-lite")
    } == {2}


@pytest.mark.parametrize("shape", ["tiny", "tiny-deepseek"])
def test_a_pair_with_two_modules(shape: str) -> None:
    pair = random_pair(f"{shape}-2-modules", torch.float32, CPU)
    assert isinstance(pair.head, MtpStack) and pair.num_modules == len(pair.head.mtp_modules) == 2
    assert len(pair.head.attention_specs) == 2


@pytest.mark.slow
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
