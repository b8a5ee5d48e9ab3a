"""What of an attached model's calls is served, in one decision: refused by name before anything changes, or run as
transformers does."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes import table_head, tiny_llama
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import specdec
from specdec.errors import InvalidInputError, ModelChangedError
from specdec.extensions.attached.attach import attach
from tests.specdec.extensions.attached.test_attach import IDS, MASK, PADDED, SIZES, greedy

SMALL = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
"""transformers' own manager fills the memory without these sizes."""
LONG = IDS.repeat(1, 13)[:, :117]  # of 128 positions


class Banned:
    """Bans tokens of its own in each row of a batch."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, tokens in enumerate(self.tokens):
            scores[row, tokens] = -torch.inf
        return scores


class Limits(StoppingCriteria):
    """Ends each row of a batch at a length of its own."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= torch.tensor([16, 20])


class Collected:
    """A streamer that takes a batch."""

    def put(self, value: torch.Tensor) -> None:
        assert value.ndim

    def end(self) -> None:
        pass


def batch(**options: Any) -> dict[str, Any]:
    return greedy(inputs=PADDED, attention_mask=MASK, **options)


def rows(*mask: list[int]) -> dict[str, Any]:
    return greedy(inputs=torch.tensor([[5, 9, 30, 7], [8, 2, 44, 3]]), attention_mask=torch.tensor(mask))


def case_of(name: str) -> tuple[dict[str, Any], str]:
    """A call that rounds cannot serve, and what its refusal says."""
    cache = DynamicCache(config=tiny_llama().config)
    processors = LogitsProcessorList([Banned([[54], [22, 4]])])
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "past_key_values": (greedy(past_key_values=cache), "past_key_values"),
        "cache": (greedy(cache=cache), "cache"),
        "long prompt": (greedy(inputs=IDS.repeat(1, 20)), "max_model_len=128"),
        "cut at the longest length": (greedy(inputs=LONG), r"max_model_len=128 there is room for 11"),
        "cut and sampled": ({"inputs": LONG, "do_sample": True, "max_new_tokens": 14}, "max_model_len=128"),
        "streamer of a batch": (batch(streamer=Collected()), "a streamer takes one sequence, not 2"),
        "a row of padding": (rows([0, 0, 0, 0], [1, 1, 1, 1]), "prompt 0: the prompt is empty"),
        "padding on the right": (rows([1, 1, 1, 0], [1, 1, 1, 1]), "padding on the left"),
        "a hole": (rows([1, 0, 1, 1], [1, 1, 1, 1]), "padding on the left"),
        "bans of each row": (batch(logits_processor=processors), r"Banned.*specdec\.row_wise"),
        "a function": (batch(logits_processor=[lambda ids, scores: scores - 9 * scores[:1]]), "function.*row_wise"),
        "bias of a batch": (batch(logits_processor=[lambda ids, s: s + torch.eye(2, 64)]), "function.*row_wise"),
        "limits of each row": (batch(stopping_criteria=StoppingCriteriaList([Limits()])), "Limits.*row_wise"),
        "bans of each sample": (
            greedy(logits_processor=processors) | {"do_sample": True, "num_return_sequences": 2},
            "Banned.*2 sequences",
        ),
    }
    return cases[name] if name else ({}, ", ".join(cases))


@pytest.fixture(scope="module")
def attached(target: Any) -> Iterator[Any]:
    with attach(target, table_head(target), num_speculative_tokens=3, **SIZES) as handle:
        yield handle


@pytest.fixture
def fallback(attached: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(attached, "fallback", True)


def seeded(generate: Callable[..., Any], case: dict[str, Any]) -> list[list[int]]:
    torch.manual_seed(3)
    found: torch.Tensor = generate(**case)
    return found.tolist()


@pytest.mark.parametrize("name", case_of("")[1].split(", "))
@pytest.mark.cases(1)
def test_what_rounds_cannot_do_is_refused_before_anything_changes(
    attached: Any, target: Any, fallback: Callable[[], None], name: str
) -> None:
    torch.manual_seed(3)
    if name == "cache" and name not in inspect.signature(target.forward).parameters:
        pytest.skip("this transformers knows it as past_key_values alone")
    rounds, generator = attached.model.engine_stats.rounds, torch.get_rng_state()
    with pytest.raises(InvalidInputError, match=case_of(name)[1]):
        target.generate(**case_of(name)[0])
    assert torch.equal(torch.get_rng_state(), generator)
    fallback()
    right = seeded(copy.deepcopy(target).generate, case_of(name)[0])
    assert seeded(target.generate, case_of(name)[0]) == right
    assert attached.model.engine_stats.rounds == rounds and attached.model.usage().requests == 0


def test_autocast_is_refused_by_name(attached: Any, target: Any, fallback: Callable[[], None]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(InvalidInputError, match=r"torch\.autocast is on"):
            target.generate(**greedy())
        fallback()
        options = greedy(return_dict_in_generate=True, output_logits=True)
        found, right = (model.generate(**options).logits[0] for model in (target, copy.deepcopy(target)))
    assert torch.equal(found, right)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.cases(1)
def test_a_class_with_a_generate_of_its_own_keeps_it(own: bool) -> None:
    target = copy.deepcopy(tiny_llama())

    def generate(self: Any, *given: Any, **named: Any) -> str:
        return "own"

    target.__class__ = type("Own", (type(target),), {"generate": generate} if own else {})
    with attach(target, **SIZES) as handle:
        if own:
            with pytest.raises(InvalidInputError, match="Own has a generate of its own"):
                target.generate(IDS)
            handle.fallback = True
            assert target.generate(IDS) == "own"
        else:
            assert target.generate(IDS, max_new_tokens=2).shape == (1, 11)


def peft_model() -> Any:
    """With two adapters."""
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 64, "init_lora_weights": False}
    torch.manual_seed(3)
    model = peft.get_peft_model(copy.deepcopy(tiny_llama()), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **options))
    return model.eval()


@pytest.mark.slow
def test_an_adapter_for_each_prompt_runs_on_the_models_own_path() -> None:
    model, plain = peft_model(), peft_model()
    options = {"input_ids": torch.tensor([[5, 9, 30], [8, 2, 44]]), "max_new_tokens": 5}
    names = {"adapter_names": ["default", "other"]}
    with attach(model, **SIZES) as handle:
        assert model.generate(**options, **names).tolist() == plain.generate(**options, **names).tolist()
        assert handle.model.engine_stats.rounds == 0
        assert model.generate(**options).tolist() == plain.generate(**options).tolist()
        assert handle.model.engine_stats.rounds > 0


@pytest.mark.slow
def test_adapters_that_are_disabled_or_merged_fall_back() -> None:
    model, plain = peft_model(), peft_model()
    options = {"input_ids": IDS, "max_new_tokens": 5}
    with attach(model, **SIZES) as handle:
        with model.disable_adapter(), pytest.raises(ModelChangedError, match="are disabled now"):
            model.generate(**options)
        handle.fallback = True
        with model.disable_adapter(), plain.disable_adapter():
            assert model.generate(**options).tolist() == plain.generate(**options).tolist()
            found = model.generate_batch([IDS[0].tolist()], GenerationConfig(max_new_tokens=5, do_sample=False), SMALL)
            assert found["req_0"].generated_tokens == plain.generate(**options)[0, 9:].tolist()
        for each in (model, plain):
            each.merge_adapter()
        assert model.generate(**options).tolist() == plain.generate(**options).tolist()
        for each in (model, plain):
            each.unmerge_adapter()
        assert handle.model.engine_stats.rounds == 0
        assert model.generate(**options).tolist() == plain.generate(**options).tolist()
        assert handle.model.engine_stats.rounds > 0


@pytest.mark.slow
@pytest.mark.parametrize("why", ["beams", "long"])
def test_a_batch_that_is_not_served_is_refused_whole(
    attached: Any, target: Any, fallback: Callable[[], None], why: str
) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=False, num_beams=2 if why == "beams" else 1)
    prompts = [[5, 6], IDS[0].tolist() * (16 if why == "long" else 1)]
    rounds = attached.model.engine_stats.rounds
    with pytest.raises(InvalidInputError, match=r"num_beams=2|prompt 1: the prompt has 144 tokens"):
        target.generate_batch(prompts, config)
    fallback()
    found = target.generate_batch(prompts, config, SMALL)
    assert [len(found[f"req_{i}"].generated_tokens) for i in range(2)] == [4, 4]
    assert attached.model.engine_stats.rounds == rounds
    assert target.generate_batch(prompts[:1], GenerationConfig(max_new_tokens=4, do_sample=False))
    assert attached.model.engine_stats.rounds > rounds


def test_row_wise_code_acts_as_before_and_only_code_is_taken() -> None:
    banned = specdec.row_wise(lambda ids, scores: scores.scatter(1, ids[:, -1:], -torch.inf))
    assert banned(torch.tensor([[0], [1]]), torch.zeros(2, 2)).tolist() == [[-torch.inf, 0], [0, -torch.inf]]
    assert specdec.row_wise(Limits())(IDS, None, more=3).tolist() == [False, False]
    for wrong in (3, LogitsProcessorList([banned])):
        with pytest.raises(InvalidInputError, match=r"row_wise\(.*give one logits processor"):
            specdec.row_wise(wrong)


def test_row_wise_code_is_served_attached_and_plain(attached: Any, target: Any) -> None:
    processor = specdec.row_wise(lambda ids, scores: scores.scatter(1, ids[:, -1:], -torch.inf))
    rounds = attached.model.engine_stats.rounds
    found = target.generate(**batch(logits_processor=LogitsProcessorList([processor])))
    assert attached.model.engine_stats.rounds > rounds
    plain = copy.deepcopy(target).generate(**batch(logits_processor=LogitsProcessorList([processor])))
    assert found.tolist() == plain.tolist()


@pytest.mark.slow
def test_the_attached_draft_model_is_transformers_assistant() -> None:
    target, assistant = tiny_llama(), tiny_llama(context=0.1)
    alone = target.generate(PADDED, attention_mask=MASK, max_new_tokens=8, do_sample=False, pad_token_id=0)
    with attach(target, draft=assistant, num_speculative_tokens=3, **SIZES) as handle:
        named = batch(max_new_tokens=8, pad_token_id=0)
        assert torch.equal(target.generate(**named, assistant_model=assistant), alone)
        assert handle.model.engine_stats.requests == 2, "a batch, which transformers refuses"
        with pytest.raises(InvalidInputError, match=r"assistant_model=….*attach\(model, draft=assistant\) drafts with"):
            target.generate(**named, assistant_model=tiny_llama(context=0.1))
