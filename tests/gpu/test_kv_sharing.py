"""Gemma 3n and Gemma 4, whose last layers share keys and values, on FlashInfer: graphs and not, drafts and not.

Head dims as published: 256, and 512 in Gemma 4's full-attention layers (by our own kernel). Gemma 3n's sparse layers
copy a number from the CPU in every forward, which no graph can hold: it says so and runs without.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fakes import eagle3_head, wrap

from specdec.errors import SpecdecWarning
from tests.agreement import agreement
from tests.public.test_kv_sharing import KINDS, PARAMS, PROMPTS, sharing, sources

CUDA = torch.device("cuda")
DIMS = dict(zip(KINDS, ({"head_dim": 256}, {"head_dim": 256, "global_head_dim": 512}), strict=True))
OPTIONS: dict[str, Any] = {"page_size": 16, "max_num_batched_tokens": 512, "hybrid_kv_cache": False}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_flashinfer_says_what_the_reference_says(kind: str, cuda_graphs: bool, drafts: int) -> None:
    """In bfloat16, where near ties may fall either way; what the caches hold is equal to the bit."""
    answers = []
    for backend in ("torch", "flashinfer"):
        model: Any = sharing(kind, **DIMS[kind])
        head: Any = eagle3_head(model).to(CUDA, torch.bfloat16) if drafts else None
        model.to(CUDA, torch.bfloat16)
        graphs: Any = cuda_graphs and backend == "flashinfer"
        if graphs and "gemma3n" in kind:
            graphs = "auto"
        with pytest.warns(SpecdecWarning, match="without CUDA graphs") if graphs == "auto" else nullcontext():
            wrapped = wrap(model, head, num_speculative_tokens=drafts, backend=backend, cuda_graphs=graphs, **OPTIONS)
        answers.append([c.token_ids for c in wrapped.generate(PROMPTS, PARAMS)])
        layers = wrapped.runners[0].layers
        for layer, source in sources(model).items():
            shared, own = layers[layer].keys[1:], layers[source].keys[1:]  # the null page: what padding wrote last
            assert torch.equal(shared, own) and bool(own.any())
        if backend == "flashinfer":
            route = wrapped.describe()["attention"]["target"]
            assert "fa2" in route and ("head dim 512" in route) == ("gemma4" in kind)
        wrapped.close()
    assert agreement(answers[1], answers[0]) >= 0.8
