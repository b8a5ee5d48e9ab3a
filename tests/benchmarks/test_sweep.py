"""A dozen telling types of the sweep, and that its judge can tell right from wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import sweep_check
from benchmarks.sweep_check import check
from benchmarks.sweep_configs import THRESHOLD, all_cases, named_cases, tiny_config
from specdec import SpeculativeModel

EXACT = (
    "llama: yarn",
    "mistral",
    "qwen3: sliding",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2: no q_lora",
    "deepseek_v3",
    "glm4_moe",
    "gpt2",
    "llama4_text",
    "phi3",
    "qwen3_next",
    "mamba2",
)
FURTHER = (
    "gemma2",
    "llama4_text",
    "llama: yarn",
    "mistral",
    "qwen3: sliding",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2: no q_lora",
    "deepseek_v3",
    "glm4_moe",
    "gpt2",
    "phi3",
    "qwen3_next",
)
"""Types that mamba2 stands for in `make test`: what is tested here is the sweep's judge, which other tests of this file
give GPT-2, a wrapper and DeepSeek; that the types are exact is tested where their attention is."""
REFUSED = {"rwkv": "keeps state", "xlm-roberta": "comes out wrong"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in FURTHER)) for n in EXACT])
@pytest.mark.thorough
def test_telling_types_are_exact(name: str) -> None:
    (case,) = (c for c in all_cases() if c.name == name)
    verdict = check(case, torch.float32, "cpu")
    assert verdict.outcome == "exact", verdict
    assert verdict.accepted is not None and verdict.accepted > 0.2
    assert "eager attention" not in verdict.notes


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.cases(1)
def test_refusals_have_their_reason(name: str) -> None:
    (case,) = (c for c in all_cases() if c.name == name)
    verdict = check(case, torch.float32, "cpu")
    assert verdict.outcome == "refused" and REFUSED[name] in verdict.reason


def altered(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """SpeculativeModel.from_pretrained of a model whose answers go through `change`."""
    load = SpeculativeModel.from_pretrained

    def loaded(*args: Any, **options: Any) -> Any:
        wrapped = load(*args, **options)
        wrapped.generate = change(wrapped.generate)
        return wrapped

    return loaded


def last_token_wrong(generate: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        completions = generate(*args)
        completions[-1].token_ids[-1] ^= 1
        return completions

    return wrong


def failing(generate: Callable[..., Any]) -> Callable[..., Any]:
    def fails(*args: Any) -> Any:
        raise IndexError("out of range")

    return fails


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_one_wrong_token_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_check.SpeculativeModel, "from_pretrained", altered(last_token_wrong))
    (case,) = (c for c in all_cases() if c.name == "gpt2")
    assert check(case, dtype, "cpu").outcome == "WRONG"


@pytest.mark.slow
def test_an_error_without_a_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_check.SpeculativeModel, "from_pretrained", altered(failing))
    (case,) = (c for c in all_cases() if c.name == "gpt2")
    verdict = check(case, torch.float32, "cpu")
    assert verdict.outcome == "unnamed exception" and "IndexError" in verdict.reason


@pytest.mark.slow
@pytest.mark.thorough
def test_eager_attention_that_gives_other_tokens_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with is the default attention: eager hid that PaliGemma attends both ways."""

    def other(model: Any) -> Any:
        copied = copy.deepcopy(model)
        copied.lm_head.weight.copy_(copied.lm_head.weight.flip(0))
        return copied

    (case,) = (c for c in all_cases() if c.name == "gpt2")
    monkeypatch.setattr(sweep_check, "eager_copy", other)
    verdict = check(case, torch.float32, "cpu")
    assert (verdict.outcome, verdict.notes) == (
        "exact",
        "its eager attention gives other tokens than its default one",
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_limit_is_told_with_its_reason_and_must_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = named_cases(("deepseek_v32",))
    verdict = check(case, torch.float32, "cpu")
    assert (verdict.outcome, verdict.limit) == ("exact, limited", THRESHOLD)
    assert f"beyond index_topk={THRESHOLD} tokens" in verdict.reason
    monkeypatch.setattr(sweep_check.SpeculativeModel, "generate", lambda *args: [])
    verdict = check(case, torch.float32, "cpu")
    assert verdict.outcome == "unnamed exception" and "was not refused" in verdict.reason


@pytest.mark.slow
@pytest.mark.thorough
def test_a_wrapper_is_read_from_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    load = SpeculativeModel.from_pretrained

    def loaded(target: Any, *args: Any, **options: Any) -> Any:
        found.append(target)
        return load(target, *args, **options)

    monkeypatch.setattr(sweep_check.SpeculativeModel, "from_pretrained", loaded)
    (case,) = named_cases(("llava",))
    assert check(case, torch.float32, "cpu").outcome == "exact"
    assert len(found) == 3 and all(isinstance(target, str) for target in found)
    assert {"(wrapper)" in case.name for case in named_cases(("wrappers",))} == {True}


@pytest.mark.slow
@pytest.mark.thorough
def test_every_type_of_the_mapping_is_a_case() -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    names = {case.model_type for case in all_cases()}
    own = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.__module__.partition(".")[0] == "transformers"]
    assert len(own) > 100 and {kind.model_type for kind in own} <= names  # others registered theirs in this process
    assert len({case.name for case in all_cases()}) == len(all_cases())


@pytest.mark.slow
def test_thresholds_lie_below_the_prompts() -> None:
    for name in ("mistral", "gemma2", "gpt_oss", "phi3"):
        assert tiny_config(named_cases((name,))[0]).sliding_window == THRESHOLD
    with pytest.raises(KeyError, match="no case nonsense"):
        named_cases(("nonsense",))


@pytest.mark.slow
@torch.no_grad()
def test_a_longrope_model_is_judged_as_its_generate_reads() -> None:
    """Past the original length its cached keys keep the short factors; read at once, all would have the long ones."""
    model = sweep_check.build(named_cases(["llama: longrope"])[0])
    prompt = list(range(1, THRESHOLD - 7))
    reference = sweep_check.Reference(model, None, [prompt], new=16)
    (answer,) = reference.answers
    assert [reference.excess(prompt, answer, at, token) for at, token in enumerate(answer)] == [0.0] * 16
    model.generation_config.eos_token_id = None
    at_once = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    assert at_once[len(prompt) - 1 : -1].argmax(-1).tolist() != answer
