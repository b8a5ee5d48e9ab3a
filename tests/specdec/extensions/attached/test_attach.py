"""An attached model's own `generate`: each case of `CASES` with and without `attach`, tokens, scores, types, errors."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, LetterTokenizer, random_prompts, table_head, tiny_llama
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForCausalLM,
    AutoTokenizer,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from specdec.errors import ClosedModelError, InvalidInputError
from specdec.extensions.attached.attach import Attachment, attach
from specdec.loading.names import builtin_path
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import row_wise

A, B, C = ([token or 1 for token in prompt] for prompt in random_prompts((9, 5, 14)))  # 0 is the pad token
IDS = torch.tensor([A])
PADDED = torch.tensor([[0] * 9 + B, C])
MASK = torch.tensor([[0] * 9 + [1] * 5, [1] * 14])
SIZES: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24}
SIZES |= {"page_size": 4, "kv_cache_tokens": 600}


class Last(LogitsProcessor):
    """Bans the last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class Longest(LogitsProcessor):
    """Bans the token that is as large as the tokens so far are many."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([input_ids.shape[1]]), float("-inf"))


class Longer(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] > 16)


def greedy(**options: Any) -> dict[str, Any]:
    return {"inputs": IDS, "do_sample": False, "max_new_tokens": 12, **options}


CASES: dict[str, dict[str, Any]] = {
    "plain": greedy(),
    "by keyword": {"input_ids": IDS, "max_new_tokens": 7},
    "default length": {"inputs": IDS},
    "max_length": {"inputs": IDS, "max_length": 15},
    "padded": greedy(inputs=PADDED, attention_mask=MASK),
    "padding found": greedy(inputs=PADDED),
    "padded, max_length": {"inputs": PADDED, "attention_mask": MASK, "max_length": 20},
    "generation config": {"inputs": IDS, "generation_config": GenerationConfig(max_new_tokens=5, pad_token_id=0)},
    "config and keyword": greedy(generation_config=GenerationConfig(repetition_penalty=1.4)),
    "end": greedy(eos_token_id=54),
    "ends of a batch": greedy(inputs=PADDED, attention_mask=MASK, eos_token_id=[47, 54, 10], pad_token_id=0),
    "repetition": greedy(repetition_penalty=1.5),
    "n-grams": greedy(no_repeat_ngram_size=2),
    "bad words": greedy(bad_words_ids=[[54], [22, 21]]),
    "least length": greedy(min_length=18, eos_token_id=54),
    "least new tokens": greedy(inputs=PADDED, attention_mask=MASK, min_new_tokens=6, eos_token_id=[54, 47]),
    "suppressed": greedy(suppress_tokens=[54], begin_suppress_tokens=[3]),
    "forced end": greedy(forced_eos_token_id=7),
    "sequence bias": greedy(sequence_bias=[[[54], -9.0]]),
    "decay": greedy(exponential_decay_length_penalty=(3, 1.5), eos_token_id=5),
    "processor": greedy(logits_processor=LogitsProcessorList([Last()])),
    "processor of theirs": greedy(logits_processor=LogitsProcessorList([MinLengthLogitsProcessor(15, 54, "cpu")])),
    "processor of a padded batch": greedy(
        inputs=PADDED,
        attention_mask=MASK,
        logits_processor=LogitsProcessorList([row_wise(Last()), row_wise(Longest())]),
    ),
    "criterion of a padded batch": greedy(
        inputs=PADDED, attention_mask=MASK, stopping_criteria=StoppingCriteriaList([row_wise(Longer())])
    ),
    "prompts of a padded batch, in processors": greedy(
        inputs=PADDED,
        attention_mask=MASK,
        logits_processor=LogitsProcessorList(
            [
                EncoderRepetitionPenaltyLogitsProcessor(3.0, PADDED),
                EncoderNoRepeatNGramLogitsProcessor(1, PADDED[:, ::2]),
            ]
        ),
    ),
    "criterion of theirs, of a batch": greedy(
        inputs=PADDED, attention_mask=MASK, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(18)])
    ),
    "prefix function of a padded batch": greedy(
        inputs=PADDED, attention_mask=MASK, prefix_allowed_tokens_fn=lambda batch_id, ids: [batch_id + len(ids), 4]
    ),
    "prefix function": greedy(prefix_allowed_tokens_fn=lambda batch_id, ids: list(range(1, VOCAB, 2))),
    "criterion": greedy(stopping_criteria=StoppingCriteriaList([Longer()])),
    "criterion of theirs": greedy(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(13)])),
    "beginning of text": {"bos_token_id": 4, "max_new_tokens": 6},
    "dict": greedy(return_dict_in_generate=True),
    "scores": greedy(return_dict_in_generate=True, output_scores=True, repetition_penalty=1.5),
    "renormalized scores": greedy(return_dict_in_generate=True, output_scores=True, renormalize_logits=True),
    "logits": greedy(return_dict_in_generate=True, output_logits=True, logits_processor=LogitsProcessorList([Last()])),
    "no cache": greedy(use_cache=False),
    "one answer": greedy(num_return_sequences=1),
    "32 bits": greedy(inputs=IDS.int()),
    "neutral arguments": greedy(synced_gpus=False, assistant_model=None, negative_prompt_ids=None, cache=None),
    "no end": greedy(eos_token_id=-1),
    "no end, and one": greedy(inputs=PADDED, attention_mask=MASK, eos_token_id=[-1, 54], pad_token_id=0),
    "end as a tensor": greedy(eos_token_id=torch.tensor(54)),
    "ends as a tensor": greedy(inputs=PADDED, attention_mask=MASK, eos_token_id=torch.tensor([47, 54, 10])),
}
WRONG: dict[str, dict[str, Any]] = {
    "unknown": greedy(max_nwe_tokens=3),
    "no room": {"inputs": IDS, "max_length": 9},
    "no new tokens": greedy(max_new_tokens=0),
    "samples of greedy": greedy(num_return_sequences=3),
    "temperature": greedy(do_sample=True, temperature=-1.0),
    "stop strings without a tokenizer": greedy(stop_strings=["a"]),
    "mask of 4 dimensions": greedy(attention_mask=torch.ones(1, 1, 9, 9)),
}
REFUSED: dict[str, dict[str, Any]] = {
    "beams": greedy(num_beams=3),
    "embeddings": {"inputs_embeds": torch.zeros(1, 4, 32), "max_new_tokens": 3},
    "guidance": greedy(guidance_scale=1.5),
    "lookup": greedy(prompt_lookup_num_tokens=3),
    "hidden states": greedy(output_hidden_states=True, return_dict_in_generate=True),
    "attentions": greedy(output_attentions=True, return_dict_in_generate=True),
}


@pytest.fixture(scope="module")
def attached(target: Any) -> Iterator[Callable[..., Any]]:
    """The attached model's generate, and beside it the plain one's."""
    plain = copy.deepcopy(target)
    with attach(target, table_head(target), num_speculative_tokens=3, **SIZES) as handle:
        target.plain, target.handle = plain.generate, handle
        yield target.generate
        del target.plain, target.handle


def call(function: Callable[..., Any], case: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    return function(**{name: copy.copy(value) for name, value in case.items()})


def same(found: Any, right: Any) -> None:
    assert type(found) is type(right)
    if isinstance(right, torch.Tensor):
        assert found.dtype == right.dtype and found.tolist() == right.tolist()
        return
    assert found.sequences.tolist() == right.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name), getattr(right, name)
        assert (ours is None) == (theirs is None)
        for one, other in zip(ours or (), theirs or (), strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.cases(1)
def test_greedy_calls_give_what_transformers_gives(attached: Any, target: Any, case: str) -> None:
    rounds = target.handle.model.engine_stats.rounds
    same(call(attached, CASES[case]), call(target.plain, CASES[case]))
    assert target.handle.model.engine_stats.rounds > rounds


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_raise_what_transformers_raises(attached: Any, target: Any, case: str) -> None:
    with pytest.raises(Exception) as theirs:
        call(target.plain, WRONG[case])
    with pytest.raises(type(theirs.value)):
        call(attached, WRONG[case])


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.cases(1)
def test_what_is_not_served_is_refused_by_name_or_runs_as_before(attached: Any, target: Any, case: str) -> None:
    with pytest.raises(InvalidInputError, match=r"beams|embeds|guidance|lookup|hidden_states|attentions"):
        call(attached, REFUSED[case])
    target.handle.fallback = True
    try:
        found = call(attached, REFUSED[case])
    finally:
        target.handle.fallback = False
    right = call(target.plain, REFUSED[case])
    assert type(found) is type(right)
    found, right = (each if isinstance(each, torch.Tensor) else each.sequences for each in (found, right))
    assert found.tolist() == right.tolist()


@pytest.mark.slow
@pytest.mark.thorough
def test_sampled_calls_repeat_by_torchs_seed_and_follow_the_distribution(attached: Any, target: Any) -> None:
    options = {"inputs": IDS, "do_sample": True, "top_k": 6, "temperature": 1.2, "max_new_tokens": 3}
    assert call(attached, options).tolist() == call(attached, options).tolist()
    torch.manual_seed(1)
    assert attached(**options).tolist() != attached(**options).tolist()
    several = attached(**options, num_return_sequences=400)
    assert several.shape == (400, 12) and several[:, :9].tolist() == [A] * 400
    logits = target.plain(IDS, max_new_tokens=1, return_dict_in_generate=True, output_logits=True).logits[0][0]
    kept = logits.topk(6)
    probs = torch.zeros(VOCAB).scatter(0, kept.indices, (kept.values / 1.2).softmax(0))
    counts = torch.bincount(several[:, 9], minlength=VOCAB)
    assert not counts[probs == 0].any()
    expected = 400 * probs[probs > 0]
    chi_square = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in 1,000


def test_samples_lie_in_order_and_each_row_has_a_seed_of_its_own(attached: Any, target: Any) -> None:
    options: dict[str, Any] = {"do_sample": True, "top_k": 9, "max_new_tokens": 4, "num_return_sequences": 2}
    found = call(attached, {"inputs": PADDED, "attention_mask": MASK, **options})
    torch.manual_seed(5)
    seeds = torch.randint(0, 2**62, (2,)).tolist()
    params = [SamplingParams(temperature=1.0, top_k=9, max_new_tokens=4, n=2, seed=seed) for seed in seeds]
    right = target.handle.model.generate([B, C], params)
    assert found[:, :14].tolist() == [row for row in PADDED.tolist() for _ in range(2)]
    assert found[:, 14:].tolist() == [each.token_ids for each in right]
    alike = call(attached, {"inputs": IDS.repeat(2, 1), **options, "max_new_tokens": 9})[:, 9:].tolist()
    assert len({*map(tuple, alike)}) == 4


def test_scores_of_a_batch(attached: Any, target: Any) -> None:
    case = greedy(inputs=PADDED, attention_mask=MASK, return_dict_in_generate=True, output_scores=True)
    same(call(attached, case), call(target.plain, case))


@pytest.mark.parametrize("own", [{"min_length": 40}, {"min_new_tokens": 30}, {"stop_strings": ["a"]}])
def test_a_call_may_switch_off_what_the_models_own_config_asks_for(
    attached: Any, target: Any, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = target.plain.__self__
    for model in (target, plain):
        for name, value in own.items():
            monkeypatch.setattr(model.generation_config, name, value)
    off = {name: None if name == "stop_strings" else 0 for name in own}
    first = int(call(target.plain, greedy(**off))[0, 11])
    case = greedy(**off, eos_token_id=first)
    right = call(target.plain, case)
    assert right.shape[1] < 21
    same(call(attached, case), right)


def test_a_call_may_go_on_past_the_models_own_end(attached: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(call(target.plain, greedy())[0, 11])
    for model in (target, target.plain.__self__):
        monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    assert call(target.plain, greedy()).shape[1] < 21
    for case in (greedy(), greedy(eos_token_id=None)):
        same(call(attached, case), call(target.plain, case))


@pytest.mark.slow
@pytest.mark.parametrize("places", [(9, 10), (12, 14), (8, 10), (0, 4)], ids=["first", "two", "over the end", "prompt"])
@pytest.mark.cases(1)
def test_stop_strings_end_where_transformers_ends(attached: Any, target: Any, places: tuple[int, int]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_path("gsm-llama"))
    stop = tokenizer.decode(call(target.plain, greedy())[0, slice(*places)])
    lengths = []
    for inputs in ({"inputs": IDS}, {"inputs": PADDED, "attention_mask": MASK, "pad_token_id": 0}):
        case = greedy(**inputs, stop_strings=[stop, "nothing of the kind"], tokenizer=tokenizer)
        right = call(target.plain, case)
        same(call(attached, case), right)
        lengths.append(right.shape[1])
    assert (lengths[0] < 21) == (places[1] > 9)


def test_processors_in_place_of_options_are_the_callers(attached: Any, target: Any) -> None:
    case = greedy(repetition_penalty=1.1, logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]))
    with pytest.warns(Warning, match="RepetitionPenaltyLogitsProcessor is used in place"):
        found = call(attached, case)
    same(found, call(target.plain, case))


class Letters(LetterTokenizer):
    """As streamers and stop strings need it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        return super().decode([int(t) for t in token_ids], skip_special_tokens=skip_special_tokens)


class Raising:
    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 1:
            raise KeyError("mine")


async def read_by_awaiting(generate: Callable[..., Any]) -> str:
    streamer = AsyncTextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    call = asyncio.to_thread(generate, **greedy(), streamer=streamer)
    return "".join((await asyncio.gather(call, pieces_of(streamer)))[1])


async def pieces_of(streamer: AsyncTextIteratorStreamer) -> list[str]:
    return [piece async for piece in streamer]


def test_streamers_get_every_token(attached: Any, target: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for function in (attached, target.plain):
        function(**greedy(), streamer=TextStreamer(Letters(), skip_prompt=True))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""
    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=attached, kwargs={**greedy(), "streamer": streamer})
    thread.start()
    assert "".join(streamer) + "\n" == printed[0]
    thread.join()
    assert asyncio.run(read_by_awaiting(attached)) + "\n" == printed[0]
    with pytest.raises(KeyError, match="mine"):
        attached(**greedy(), streamer=Raising())
    assert target.handle.model.usage().requests == 0
    with pytest.raises(ValueError, match="a streamer takes one sequence"):
        attached(inputs=PADDED, attention_mask=MASK, max_new_tokens=2, streamer=TextStreamer(Letters()))


@pytest.mark.slow
@pytest.mark.thorough
def test_copies_are_plain_models(tmp_path: Path) -> None:
    target = copy.deepcopy(tiny_llama())
    right = call(target.generate, CASES["plain"]).tolist()
    with attach(target, **SIZES) as handle:
        buffer = io.BytesIO()
        torch.save(target, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(target), pickle.loads(pickle.dumps(target)), torch.load(buffer, weights_only=False)]
        target.save_pretrained(tmp_path)
        copies.append(type(target).from_pretrained(tmp_path))
        for one in copies:
            assert call(one.generate, CASES["plain"]).tolist() == right
            with attach(one, **SIZES) as own:
                assert call(one.generate, CASES["plain"]).tolist() == right
                assert own.model.engine_stats.rounds > 0
        assert handle.model.engine_stats.rounds == 0


def test_detached_models_are_as_before() -> None:
    target, other = copy.deepcopy(tiny_llama()), copy.deepcopy(tiny_llama())
    own = type("OfThisTest", (type(target),), {})  # no other attachment has replaced its methods
    target.__class__ = other.__class__ = own
    before = dict(vars(own))
    first, second = attach(target, **SIZES), attach(other, **SIZES)
    with pytest.raises(InvalidInputError, match="attached already"):
        attach(target, **SIZES)
    right = first.model.hf_model.generate(IDS, max_new_tokens=4)
    first.detach()
    first.detach()
    assert "detached" in repr(first) and "attached" in repr(second)
    assert target.generate(IDS, max_new_tokens=4).tolist() == right.tolist()
    assert second.model.engine_stats.rounds == 0 and vars(own) != before
    second.detach()
    assert vars(type(target)) == before and vars(target).keys() == vars(tiny_llama()).keys()


def test_a_custom_generate_of_the_instance_is_put_back() -> None:
    target = copy.deepcopy(tiny_llama())
    vars(target)["generate"] = own = lambda *given, **named: "own"
    with attach(target, **SIZES):
        assert isinstance(target.generate(IDS, max_new_tokens=2), torch.Tensor)
    assert target.generate is own


def test_detaching_ends_calls_on_other_threads() -> None:
    target = copy.deepcopy(tiny_llama())
    handle = attach(target, **SIZES)
    started, errors = threading.Event(), list[BaseException]()

    def noted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        started.set()
        return scores

    def run() -> None:
        try:
            target.generate(IDS, max_new_tokens=110, logits_processor=[noted], eos_token_id=None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    handle.detach()
    thread.join()
    assert [type(error) for error in errors] in ([ClosedModelError], [])


def test_a_model_stays_attached_without_its_handle_and_goes_with_it() -> None:
    target = copy.deepcopy(tiny_llama())
    right = target.generate(IDS, max_new_tokens=4).tolist()
    attach(target, **SIZES)
    gc.collect()
    found = Attachment.of(target)
    assert found is not None and target.generate(IDS, max_new_tokens=4).tolist() == right
    assert found.model.engine_stats.rounds > 0
    gone = [weakref.ref(each) for each in (target, found, found.model)]
    del target, found
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    other = copy.deepcopy(tiny_llama())  # its class still looks for attachments
    assert other.generate(IDS, max_new_tokens=4).tolist() == right


def test_a_peft_models_own_generate_runs_on_it() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["lm_head"], r=4, lora_alpha=64, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(3)
    target = peft.get_peft_model(copy.deepcopy(tiny_llama()), config).eval()
    right = target.generate(input_ids=IDS, max_new_tokens=8).tolist()
    assert right != tiny_llama().generate(input_ids=IDS, max_new_tokens=8).tolist()
    with attach(target, **SIZES) as handle:
        assert target.generate(input_ids=IDS, max_new_tokens=8).tolist() == right
        assert handle.model.engine_stats.rounds > 0


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="attach takes a loaded transformers model, not 'gsm-llama'"):
        attach("gsm-llama")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_with_modules_of_its_own_needs_no_tokenizer() -> None:
    """Its multi-token-prediction module is checked on a text, by the tokenizer beside its weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(builtin_path("gsm-deepseek"), dtype=torch.float32)
    ids = torch.tensor([[5, 9, 30, 7]])
    right = model.generate(ids, max_new_tokens=6, do_sample=False)
    with attach(model, "mtp", num_speculative_tokens=2, max_num_seqs=2):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), right)
    model.name_or_path = "nowhere"
    with pytest.raises(InvalidInputError, match=r"'nowhere' has none: give attach\(…, tokenizer=…\)"):
        attach(model, builtin_path("gsm-deepseek"), num_speculative_tokens=2)
