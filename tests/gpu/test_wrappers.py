"""Wrappers from a folder on a GPU: compiled and from CUDA graphs they say what they say in eager rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, random_prompts

from specdec import SamplingParams, SpeculativeModel
from tests.agreement import agreement
from tests.hybrids import RecallHead
from tests.wrappers import own_text, tiny_config, tiny_wrapper

NEW = 32
WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
"""Heads that FlashInfer takes."""
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3", "gemma3"])
def test_graphs_give_the_text_of_the_wrapper(name: str, drafts: int, tmp_path: Path) -> None:
    wrapper = tiny_wrapper(tiny_config(name, **WIDE, **(MROPE if name == "qwen3_vl" else {})))
    wrapper.save_pretrained(tmp_path)
    prompts = random_prompts([5, 37, 60], vocab_size=60)
    own = [own_text(wrapper, prompt, NEW) for prompt in prompts]
    texts = []
    for graphs in (False, True):
        head = RecallHead(own, 0.6, head_dim=64).to("cuda", torch.float16) if drafts else None
        with SpeculativeModel.from_pretrained(
            tmp_path,
            head,
            num_speculative_tokens=drafts,
            backend="flashinfer",
            dtype=torch.float16,
            device="cuda",
            tokenizer=LetterTokenizer(),
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            cuda_graphs=graphs,
        ) as model:
            assert model.graphs.startswith("on" if graphs else "off")
            assert model.describe()["twin"].startswith("exact")
            texts.append([c.token_ids for c in model.generate(prompts, SamplingParams(max_new_tokens=NEW))])
    assert agreement(*texts) >= 0.8  # in half precision a tie may part two texts
