"""What a check of the model that runs beside a round finds, and whom it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import engine_of, free_everywhere, hf_greedy, random_prompts, tiny_llama, wrap

from specdec.errors import ModelChangedError
from specdec.requests.sampling import SamplingParams
from specdec.wrapped.changes import LiveModel

PROMPTS = random_prompts((9, 5))
PARAMS = SamplingParams(max_new_tokens=12)


def moved() -> None:
    raise ModelChangedError("moved")


def broken() -> None:
    """As on a model whose embeddings were taken away."""
    raise AttributeError("'NoneType' object has no attribute 'weight'")


@pytest.mark.parametrize(
    ("check", "words"), [(moved, "(?m)^moved$"), (broken, "cannot be looked at .AttributeError: 'None")]
)
@pytest.mark.cases(1)
def test_a_check_refuses_its_own_call_and_is_not_run_again(
    check: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = wrap(tiny_llama())
    other = wrapped.stream(PROMPTS[1], PARAMS)
    updates = [next(other)]
    with monkeypatch.context() as patched:
        patched.setattr(LiveModel, "begin_check", lambda live: check)
        with pytest.raises(ModelChangedError, match=words):
            wrapped.generate(PROMPTS[0], PARAMS)
    assert not engine_of(wrapped).meanwhile
    updates += list(other)
    assert [t for u in updates for t in u.token_ids] == hf_greedy(PROMPTS[1], 12)
    assert wrapped.generate(PROMPTS[0], PARAMS)[0].token_ids == hf_greedy(PROMPTS[0], 12)
    assert free_everywhere(wrapped)


def test_a_refused_round_leaves_no_prefixes() -> None:
    """It may have read the prompt through what has changed; the model is as it was when the prompt comes again."""
    wrapped = wrap(tiny_llama(), page_size=4)
    layer: Any = wrapped.hf_model.model.layers[0]
    own = layer.mlp
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LiveModel, "begin_check", lambda live: live.check)
        layer.mlp = torch.nn.Identity().eval()
        with pytest.raises(ModelChangedError, match="modules of the model were added, removed or replaced"):
            wrapped.generate(PROMPTS[0], PARAMS)
        layer.mlp = own
    assert wrapped.generate(PROMPTS[0], PARAMS)[0].token_ids == hf_greedy(PROMPTS[0], 12)
    assert wrapped.engine_stats.prefix_hit_tokens == 0
