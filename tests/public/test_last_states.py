"""A head on the target's last state reads just that, wherever the model's class keeps the module that gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import EOS, TINY, VOCAB, LetterTokenizer, enlarge, random_prompts, tiny_llama, wrap
from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM, PreTrainedModel

from benchmarks.sweep_configs import named_cases
from benchmarks.sweep_models import build
from drafters.eagle3.head import Eagle1Head
from drafters.eagle3.spec import Eagle1Spec
from drafters.oracle import oracle_drafts
from specdec import SamplingParams, UnsupportedModelError
from specdec.extensions.training.run import final_features
from specdec.selftest.selftest import read_text
from tests.public.test_llama4 import llama4

PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True, return_drafts=True)


def modernbert() -> PreTrainedModel:
    """Its `decoder` is the output embedding."""
    torch.manual_seed(0)
    sizes = {**TINY, "num_attention_heads": 2, "max_position_embeddings": 256, "local_attention": 32}
    ids = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    model: Any = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**{**sizes, **ids})).eval()
    enlarge(model)
    return model  # type: ignore[no-any-return]


MODELS = {
    "llama": tiny_llama,
    "llama4": lambda: llama4(False, 4),
    "llama4 in a wrapper": lambda: llama4(True, 4),
    "modernbert-decoder": modernbert,
}


def eagle1_head(model: PreTrainedModel) -> Eagle1Head:
    """A random head; its drafts depend on the states that it reads."""
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    torch.manual_seed(1)
    spec = Eagle1Spec(
        hidden_size=embedding.weight.shape[1],
        target_hidden_size=embedding.weight.shape[1],
        draft_vocab_size=len(output.weight),
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=len(output.weight),
    )
    head = Eagle1Head(spec, embedding.weight, output.weight).eval().requires_grad_(False)
    enlarge(head)
    with torch.no_grad():
        head.fc.weight[:, spec.hidden_size :] += torch.eye(spec.hidden_size)
    return head


def last_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[T, H] as transformers reports them."""
    with torch.no_grad():
        hidden = model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return hidden[-1][0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.cases(1)
def test_drafts_are_those_of_the_oracle(name: str) -> None:
    """The vocabulary is twice the width, so that logits in place of states would be as many numbers."""
    model = MODELS[name]()
    assert VOCAB % model.config.get_text_config().hidden_size == 0
    head = eagle1_head(model)
    prompts = random_prompts([5, 30])
    with wrap(model, head, num_speculative_tokens=3, max_model_len=64) as wrapped, torch.no_grad():
        for prompt, completion in zip(prompts, wrapped.generate(prompts, PARAMS), strict=True):
            ids, bonus, compared = torch.tensor(prompt + completion.token_ids), len(prompt), 0
            states = last_states(model, ids)
            for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
                right = oracle_drafts(head, ids[: bonus + 1], states[:bonus], len(drafts)) if drafts else []
                assert list(drafts) == right
                compared += len(drafts)
                bonus += stats.emitted
            assert compared > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_test_of_a_head_and_its_training_read_the_same_states(name: str) -> None:
    model = MODELS[name]()
    ids, states = read_text(model, LetterTokenizer())
    torch.testing.assert_close(states, last_states(model, ids))
    with wrap(model, max_model_len=64) as wrapped:
        states, logits = final_features(wrapped)(ids[None, :20], torch.ones(1, 20, dtype=torch.bool))
    torch.testing.assert_close(states[0], last_states(model, ids[:20]))
    assert logits.shape == (1, 20, VOCAB)


@pytest.mark.long
@pytest.mark.parametrize("name", ["kosmos-2.5 (wrapper)", "nemotron_h_omni (wrapper)"])
def test_wrappers_around_a_model_with_logits(name: str) -> None:
    """Their `get_decoder` gives logits."""
    model = build(named_cases((name,))[0])
    ids, states = read_text(model, LetterTokenizer())
    torch.testing.assert_close(states, last_states(model, ids))


@pytest.mark.usefixtures("every_self_test")
def test_a_model_without_such_a_module_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    inner = model.model.forward

    def plain(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        return type("Output", (), {"__getitem__": lambda self, i: found[i], "last_hidden_state": None})()

    monkeypatch.setattr(model.model, "forward", plain)
    monkeypatch.setattr(model, "forward", lambda input_ids, **kw: _logits(model, model.model(input_ids, **kw)[0]))
    with pytest.raises(UnsupportedModelError, match="LlamaModel gives no last hidden states"):
        wrap(model, eagle1_head(model), num_speculative_tokens=3)


def _logits(model: Any, states: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(logits=model.lm_head(states))
