"""Llama 4: layers that attend in chunks, and others that scale their queries by position, with and without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from fakes import TINY, enlarge, random_prompts, table_head, wrap
from transformers import (
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    PreTrainedModel,
)

from attention.spec import Reach
from specdec import SamplingParams
from specdec.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("every_self_test")

NEW = 12
PROMPTS = random_prompts([5, 37, 90])
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vision_output_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def text_sizes(chunk: int) -> dict[str, Any]:
    """Three layers in chunks and one without rotary embedding, two of them with experts; the factor of the queries
    changes every 16 positions."""
    return {
        **TINY,
        "max_position_embeddings": 256,
        "attention_chunk_size": chunk,
        "no_rope_layers": [1, 1, 0, 1],
        "attn_temperature_tuning": True,
        "attn_scale": 2.0,
        "floor_scale": 16,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
    }


def llama4(wrapper: bool, chunk: int) -> PreTrainedModel:
    torch.manual_seed(0)
    if wrapper:
        config = Llama4Config(text_config=text_sizes(chunk), vision_config=VISION)
        model: Any = Llama4ForConditionalGeneration(config).eval()
    else:
        model = Llama4ForCausalLM(Llama4TextConfig(**text_sizes(chunk))).eval()
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    try:
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    except AttributeError as error:  # of the wrapper in 5.24.0, which is refused for that by name
        pytest.skip(f"in transformers {transformers.__version__} its own forward raises AttributeError: {error}")
    enlarge(model)
    with torch.no_grad():  # the last token decides often enough that some drafts of its bigrams are accepted
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(0.1)
    return model


def says_alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens by the model's own eager forward over the whole row, without any cache."""
    model.set_attn_implementation("eager")
    row = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "chunk", "page_size"),
    [
        pytest.param(False, 6, 2, id="text-6-2"),
        pytest.param(True, 4, 4, id="wrapper-4-4"),
        pytest.param(False, 4, 4, id="text-4-4", marks=pytest.mark.long),
        pytest.param(True, 6, 2, id="wrapper-6-2", marks=pytest.mark.long),
    ],
)
@pytest.mark.cases(1)
def test_it_is_exact_past_several_chunks_with_and_without_drafts(wrapper: bool, chunk: int, page_size: int) -> None:
    """A verification of six tokens lies in up to three chunks of four; prompts are read in pieces of 24 tokens."""
    model = llama4(wrapper, chunk)
    right = [says_alone(model, prompt) for prompt in PROMPTS]
    params = SamplingParams(max_new_tokens=NEW)
    with wrap(model, max_model_len=120, page_size=page_size) as plain:
        assert [completion.token_ids for completion in plain.generate(PROMPTS, params)] == right
        assert plain.describe()["twin"] == f"exact past attention_chunk_size={chunk}, floor_scale=16"
        assert plain.runners[1].routes[0].endswith(f"in chunks of {chunk} tokens")
        assert [pool.reach for pool in plain.config.windowed] == [Reach(chunk, chunk)], "pages before a chunk are freed"
    drafted = wrap(model, table_head(model), max_model_len=120, page_size=page_size, num_speculative_tokens=5)
    with drafted:
        completions = drafted.generate(PROMPTS, params)
    assert [completion.token_ids for completion in completions] == right
    accepted, rounds = (sum(getattr(c.pooled, name) for c in completions) for name in ("accepted", "rounds"))
    assert accepted > 0 and rounds > len(completions), "drafts are accepted and rejected"
    assert [says_alone(model, prompt) for prompt in PROMPTS] == right, "the model is not what it was"


def test_chunks_that_do_not_begin_on_a_page_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="chunks of 6 tokens needs a page size that divides 6; given pages of 4"
    ):
        wrap(llama4(False, 6))
