"""What a request may say: every value is right or refused before anything is started; no message prints it whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LetterTokenizer, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, GenerationConfig

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import CacheTooSmallError, InvalidInputError

PAD = 61
NEW = 8
SHORT = SamplingParams(max_new_tokens=NEW)
PROMPTS = [[5, 9, 11, 3], [7, 2, 30, 8, 8, 1]]


class PaddedTokenizer(LetterTokenizer):
    """A tokenizer with a pad token of its own."""

    pad_token_id: int | None = PAD
    eos_token_id = 63
    bos_token_id = None


@pytest.fixture(scope="module")
def model() -> Any:
    target = tiny_llama()
    return wrap(target, table_head(target), num_speculative_tokens=3, tokenizer=PaddedTokenizer())


def answers(model: Any, prompts: Any, params: Any = SHORT) -> list[list[int]]:
    return [c.token_ids for c in model.generate(prompts, params)]


RIGHT = [hf_greedy(p, NEW) for p in PROMPTS]


WRONG_VALUES: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 1.5, 20.0, math.inf, math.nan, 1e30, "5", None, True, np.bool_(True), [5], 1j],
    "temperature": [-1, math.nan, math.inf, -math.inf, 1e-300, 1e300, 1e-45, "0.5", None, True, [0.5], 10**400, 1j],
    "top_k": [-1, 1.5, 5.0, 2**31, 10**30, math.inf, "5", None, False, np.float32(3), torch.tensor([1, 2])],
    "top_p": [0, -0.1, 1.1, math.nan, math.inf, "1", None, True, np.array([0.5])],
    "min_p": [-0.1, 1.1, math.nan, math.inf, "0", None, False],
    "stop": ["", [""], ["a", ""], [5], [None], [b"a"], b"abc", None, 5, ("a", ["b"]), {"a": 1}],
    "stop_token_ids": [["a"], [1.0], [True], [-1], 5, "5", None, b"ab", [[1]]],
    "ignore_eos": ["yes", 1, 0, None, "False"],
    "return_drafts": ["yes", 1, None, []],
    "seed": [1.0, "1", True, 2**64, -(2**63) - 1, 10**5000, math.nan, [1]],
    "num_speculative_tokens": [-1, 1.0, "2", True, math.inf],
    "n": [0, -1, 1.0, "2", True, 10**30, None],
}
RIGHT_VALUES: dict[str, list[tuple[Any, Any]]] = {
    "max_new_tokens": [(np.int64(5), 5), (torch.tensor(5), 5), (10**30, 10**30)],
    "temperature": [(1, 1.0), (np.float32(0.5), 0.5), (torch.tensor(0.5), 0.5), (Decimal("0.5"), 0.5), (0, 0.0)],
    "top_k": [(np.int32(7), 7), (2**31 - 1, 2**31 - 1)],
    "top_p": [(1, 1.0), (np.float64(0.5), 0.5)],
    "stop": [("a", ("a",)), (["a", "b"], ("a", "b")), ("x" * 10**6, ("x" * 10**6,))],
    "stop_token_ids": [([np.int64(3)], (3,)), ((), ())],
    "ignore_eos": [(np.bool_(True), True)],
    "seed": [(-5, -5), (2**64 - 1, 2**64 - 1), (np.uint64(3), 3)],
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_value_is_refused_by_the_constructor(name: str) -> None:
    for value in WRONG_VALUES[name]:
        with pytest.raises(InvalidInputError, match=name) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 300
        with pytest.raises(InvalidInputError, match=name):
            replace(SamplingParams(), **{name: value})


@pytest.mark.parametrize("name", RIGHT_VALUES)
def test_a_scalar_of_another_library_is_kept_as_a_plain_number(name: str) -> None:
    for given, kept in RIGHT_VALUES[name]:
        found = getattr(SamplingParams(**{name: given}), name)
        assert found == kept and type(found) is type(kept)


@pytest.mark.slow
@pytest.mark.thorough
def test_values_at_the_edge_give_a_right_answer(model: Any) -> None:
    top = [
        SamplingParams(max_new_tokens=NEW, temperature=1e-6, seed=1),
        SamplingParams(max_new_tokens=NEW, temperature=1e6, top_k=1, seed=1),
        SamplingParams(max_new_tokens=NEW, temperature=1.0, top_p=1e-300, seed=-1),
        SamplingParams(max_new_tokens=NEW, temperature=1.0, min_p=1.0, seed=2**64 - 1),
        SamplingParams(max_new_tokens=NEW, stop="x" * 10**6),
        SamplingParams(max_new_tokens=NEW, top_k=2**31 - 1),
    ]
    assert answers(model, [PROMPTS[0]] * len(top), top) == [RIGHT[0]] * len(top)
    flat = SamplingParams(max_new_tokens=NEW, temperature=1e6, seed=3)
    assert all(0 <= t < 64 for t in answers(model, PROMPTS[0], flat)[0])
    (longest,) = model.generate(PROMPTS[0], SamplingParams(max_new_tokens=10**30))
    assert longest.finish_reason == "length" and len(longest.token_ids) + len(PROMPTS[0]) == 128


class Loose(SamplingParams):
    """A subclass that skips the checks."""

    def __post_init__(self) -> None:
        pass


class Duck:
    max_new_tokens, temperature, stop, n = 5, 0.0, (), 1


PARAMS: dict[str, tuple[Callable[[], Any], str]] = {
    "dict": (lambda: {"max_new_tokens": 5}, "SamplingParams.from_dict"),
    "str": (lambda: "greedy", "params='greedy'"),
    "duck": (Duck, "params=.*SamplingParams or a transformers.GenerationConfig"),
    "list of dicts": (lambda: [{}, {}], r"params has \{\}"),
    "too few": (lambda: [SHORT], "1 SamplingParams for 2 prompts"),
    "a subclass without checks": (lambda: Loose(temperature=math.nan), "temperature=nan"),
    "a stop id outside the vocabulary": (
        lambda: SamplingParams(stop_token_ids=(3, 64)),
        "stop_token_ids: token id 64 is outside the vocabulary 0 … 63",
    ),
    "K": (lambda: SamplingParams(num_speculative_tokens=10**20), "this model was loaded for at most 3"),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_wrong_parameters_are_refused_at_submission(kind: str, model: Any) -> None:
    make, message = PARAMS[kind]
    rounds = model.engine_stats.rounds
    with pytest.raises(InvalidInputError, match=message):
        model.stream(PROMPTS, make())  # nothing of it is consumed
    assert model.engine_stats.rounds == rounds
    assert answers(model, PROMPTS) == RIGHT


def test_a_subclass_with_right_values_and_a_list_of_configs_are_served(model: Any) -> None:
    assert answers(model, PROMPTS[0], Loose(max_new_tokens=NEW)) == RIGHT[:1]
    assert answers(model, PROMPTS, [SHORT, GenerationConfig(max_new_tokens=NEW)]) == RIGHT


def rows(side: str) -> tuple[list[list[int]], list[list[int]]]:
    """Both prompts padded to one length, and their mask."""
    width = max(map(len, PROMPTS))
    pads = [width - len(p) for p in PROMPTS]
    if side == "left":
        ids = [[PAD] * n + p for n, p in zip(pads, PROMPTS, strict=True)]
        return ids, [[0] * n + [1] * len(p) for n, p in zip(pads, PROMPTS, strict=True)]
    ids = [p + [PAD] * n for n, p in zip(pads, PROMPTS, strict=True)]
    return ids, [[1] * len(p) + [0] * n for n, p in zip(pads, PROMPTS, strict=True)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("convert", [list, np.array, torch.tensor], ids=["lists", "numpy", "torch"])
@pytest.mark.cases(1)
def test_a_padded_batch_is_read_with_its_mask_and_refused_without(side: str, convert: Any, model: Any) -> None:
    ids, mask = (convert(part) for part in rows(side))
    encoding = {"input_ids": ids, "attention_mask": mask}
    for batch in (encoding, BatchEncoding(encoding), {**encoding, "token_type_ids": ids}):
        assert answers(model, batch) == RIGHT
    for batch in (ids, {"input_ids": ids}):
        with pytest.raises(InvalidInputError, match=r"pad id 61.*attention_mask.*BatchEncoding"):
            model.generate(batch, SHORT)


def test_a_pad_id_is_a_token_where_it_is_one(model: Any) -> None:
    prompt = [PAD, 4, PAD]
    right = [hf_greedy(prompt, NEW)]
    assert answers(model, {"input_ids": prompt, "attention_mask": [1, 1, 1]}) == right
    assert answers(model, [4, PAD, 5]) == [hf_greedy([4, PAD, 5], NEW)]
    for pad in (63, None):  # the eos token, or none: nothing tells it from text
        tokenizer = PaddedTokenizer()
        tokenizer.pad_token_id = pad
        assert answers(wrap(tiny_llama(), tokenizer=tokenizer), [63, 4]) == [hf_greedy([63, 4], NEW)]


@pytest.mark.slow
@pytest.mark.thorough
def test_tensors_and_arrays_are_prompts(model: Any) -> None:
    equal = [PROMPTS[0], PROMPTS[1][:4]]
    right = [hf_greedy(p, NEW) for p in equal]
    for convert in (np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)):
        assert answers(model, convert(equal)) == right
        assert answers(model, convert(equal[0])) == right[:1]
        assert answers(model, [convert(p) for p in PROMPTS]) == RIGHT
        assert answers(model, [convert([p]) for p in PROMPTS]) == RIGHT, "one row each"
    assert answers(model, [BatchEncoding({"input_ids": p}) for p in PROMPTS]) == RIGHT
    assert answers(model, [[np.int64(t) for t in PROMPTS[0]]]) == RIGHT[:1]
    assert answers(model, tuple(PROMPTS[0])) == RIGHT[:1]


@pytest.mark.parametrize("kind", [">i8", ">u2", "<i4", ">i4"])
def test_integers_in_any_order_of_bytes(kind: str, model: Any) -> None:
    assert answers(model, np.array(PROMPTS[0]).astype(kind)) == RIGHT[:1]
    assert answers(model, [list(np.array(PROMPTS[0]).astype(kind))]) == RIGHT[:1]


@pytest.mark.parametrize("none", [[], (), np.zeros((0, 5), int), torch.zeros((0, 5)).long()], ids=repr)
def test_no_prompts_give_no_answers(none: Any, model: Any) -> None:
    assert model.generate(none, SHORT) == model.generate(none, []) == list(model.stream(none)) == []
    assert model.prefill(none) == []


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a compiler has it, without data."""
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


BAD_PROMPTS: dict[str, tuple[Callable[[], Any], str]] = {
    "bytes": (lambda: b"abc", "bytes, not text"),
    "bytes in a list": (lambda: [b"abc"], "not bytes"),
    "bytearray": (lambda: bytearray(b"abc"), "bytearray, not text"),
    "None": (lambda: None, "no prompts in None"),
    "a generator": (lambda: (p for p in PROMPTS), "no prompts in <generator"),
    "floats": (lambda: [1.0, 2.0], "not float"),
    "bools": (lambda: [True, False], "not bool"),
    "a float tensor": (lambda: torch.zeros(3), r"float32 and shape \(3,\).*tolist"),
    "a bool array": (lambda: np.zeros((2, 3), bool), r"bool and shape \(2, 3\).*tolist"),
    "a number": (lambda: torch.tensor(3), r"shape \(\).*tolist"),
    "three dimensions": (lambda: np.zeros((200, 200, 3), np.int64), r"shape \(200, 200, 3\).*tolist"),
    "one message": (lambda: {"role": "user", "content": "hi"}, "no input_ids; a chat message goes in a list"),
    "embeddings": (lambda: {"inputs_embeds": torch.zeros(1, 3, 32)}, "no input_ids"),
    "more than ids": (lambda: {"input_ids": [1], "pixel_values": [2]}, "not supported.*pixel_values"),
    "a mask with a hole": (lambda: {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "zeros between ones"),
    "a mask of floats": (lambda: {"input_ids": [1], "attention_mask": [0.5]}, "attention_mask is a list of whole"),
    "a mask of twos": (lambda: {"input_ids": [1], "attention_mask": [2]}, "attention_mask has 2"),
    "a mask of another shape": (lambda: {"input_ids": [[1, 2]], "attention_mask": [[1]]}, "different shapes"),
    "a mask of zeros": (lambda: {"input_ids": [1], "attention_mask": [0]}, "the prompt is empty"),
    "a batch in a list": (lambda: [torch.tensor([[1, 2], [3, 4]])], "has one row, not 2"),
    "a lone surrogate": (lambda: "a\ud800b", "not valid Unicode"),
    "a float among ids": (lambda: [1, 2.5], r"token ids has 2\.5 \(float\) at index 1"),
    "a float in one of several": (lambda: [[1, 2], [3, 2.5]], r"has 2\.5 \(float\) at index 1"),
    "nothing among ids": (lambda: [1, None], "has None"),
    "a meta tensor": (lambda: torch.ones(1, 5, dtype=torch.long, device="meta"), "device 'meta' and has no values"),
    "a meta tensor in a list": (lambda: [torch.ones(5, dtype=torch.long, device="meta")], "has no values"),
    "a meta mask": (
        lambda: {"input_ids": [[1, 2]], "attention_mask": torch.ones(1, 2, dtype=torch.long, device="meta")},
        "has no values",
    ),
    "a sparse tensor": (lambda: torch.ones(1, 5, dtype=torch.long).to_sparse(), "is sparse; give it dense"),
    "a nested tensor": (lambda: torch.nested.nested_tensor(list(torch.ones(2, 3).long())), "is nested; give a list"),
    "a jagged tensor": (
        lambda: torch.nested.nested_tensor(list(torch.ones(2, 3).long()), layout=torch.jagged),
        "is nested; give a list",
    ),
    "a quantised tensor": (lambda: torch.quantize_per_tensor(torch.ones(1, 5), 1.0, 0, torch.qint8), "is quantised"),
    "a tensor without data": (lambda: fake(torch.ones(1, 5).long()), "cannot be read: DataDependentOutput"),
    "no tokens": (lambda: [[]], "the prompt is empty"),
    "no tokens in an array": (lambda: np.zeros(0, int), "the prompt is empty"),
    "rows without tokens": (lambda: np.zeros((2, 0), int), "the prompt is empty"),
    "an enormous id": (lambda: [1, 10**40], "outside the vocabulary"),
    "too long": (lambda: list(range(60)) * 10**4, "the prompt has 600000 tokens"),
    "an enormous list": (lambda: [0.5] * 10**6, "not float"),
    "an enormous dict": (lambda: {str(i): i for i in range(10**5)}, "no input_ids"),
    "an enormous tensor": (lambda: torch.full((10**6,), 0.5), r"shape \(1000000,\)"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
@pytest.mark.cases(1)
def test_a_bad_prompt_is_refused_before_anything_starts(kind: str, model: Any) -> None:
    make, message = BAD_PROMPTS[kind]
    rounds = model.engine_stats.rounds
    with pytest.raises(InvalidInputError, match=message) as caught:
        model.stream(make(), SHORT)
    assert len(str(caught.value)) < 500, "no object is printed whole"
    assert model.engine_stats.rounds == rounds
    assert answers(model, PROMPTS) == RIGHT


@pytest.mark.slow
def test_a_chat_that_the_template_cannot_read_is_refused() -> None:
    model = SpeculativeModel.from_pretrained("gsm-llama")
    for chat in ([{"rôle": "user"}], [{"role": "user", "content": 5}], [{"role": 3, "content": None}]):
        with pytest.raises(InvalidInputError, match="chat message 1"):
            model.stream(chat, SHORT)


SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=5)


@pytest.mark.slow
def test_n_completions_in_a_row_that_do_not_depend_on_n(model: Any) -> None:
    one, three, five = (answers(model, PROMPTS, replace(SAMPLED, n=n)) for n in (1, 3, 5))
    assert [len(found) for found in (one, three, five)] == [2, 6, 10]
    assert three[:3] == five[:3] and three[3:] == five[5:8] and [three[0], three[3]] == one
    assert len({tuple(t) for t in five[:5]}) > 2
    completions = model.generate(PROMPTS, replace(SAMPLED, n=2))
    assert [c.sample_index for c in completions] == [0, 1, 0, 1]
    assert [c.prompt_token_ids for c in completions] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2


def test_n_of_each_prompt_and_the_index_of_a_stream(model: Any) -> None:
    params = [replace(SAMPLED, n=2), SHORT]
    tokens: dict[int, list[int]] = {}
    for update in model.stream(PROMPTS, params):
        tokens.setdefault(update.index, []).extend(update.token_ids)
    assert [tokens[i] for i in range(3)] == answers(model, PROMPTS, params)
    assert tokens[2] == RIGHT[1]
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW, num_return_sequences=3)
    assert len(model.generate(PROMPTS, config)) == 6


def test_greedy_decoding_has_one_completion() -> None:
    with pytest.raises(InvalidInputError, match="n=2 with temperature=0: greedy decoding has one completion"):
        SamplingParams(n=2)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_built_in_model_as_an_object_finds_its_head() -> None:
    named = SpeculativeModel.from_pretrained("gsm-llama", draft="auto", max_num_seqs=2)
    folder = named.hf_model.name_or_path
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": "Tom has 3 boxes of 12 eggs. How many eggs?"}]
    params = SamplingParams(max_new_tokens=24, return_drafts=True)
    (right,) = named.generate(chat, params)
    for given in (target, folder):
        wrapped = SpeculativeModel.from_pretrained(given, draft="auto", max_num_seqs=2)
        (completion,) = wrapped.generate(chat, params)
        assert (completion.token_ids, completion.drafts) == (right.token_ids, right.drafts)


@pytest.mark.slow
def test_the_tokenizers_batch_of_a_built_in_model() -> None:
    """The habit: tokenizer(texts, return_tensors="pt", padding=True)."""
    model = SpeculativeModel.from_pretrained("gsm-llama", max_num_seqs=2)
    tokenizer = AutoTokenizer.from_pretrained(model.hf_model.name_or_path)
    texts = ["Tom has 3 boxes.", "Anna has 12 apples and gives 5 of them away."]
    right = answers(model, texts)
    for side in ("left", "right"):
        tokenizer.padding_side = side
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        assert answers(model, batch) == right
        with pytest.raises(InvalidInputError, match="attention_mask"):
            model.generate(batch["input_ids"], SHORT)


def test_prompts_of_other_lengths_are_still_served(model: Any) -> None:
    prompts = random_prompts([1, 17, 40], seed=5, vocab_size=60)
    assert answers(model, prompts) == [hf_greedy(p, NEW) for p in prompts]


def test_an_error_about_one_of_several_prompts_says_which() -> None:
    wrapped = wrap(tiny_llama(), max_model_len=64)
    params = [SamplingParams(max_new_tokens=2, n=n, temperature=1.0) for n in (3, 1, 2)]
    for prompts, words in (
        ([[1, 2], [3] * 64, [4]], "^prompt 1: the prompt has 64 tokens"),
        ([[1, 2], [3], [4, 10**6]], "^prompt 2: token id 1000000 is outside"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            wrapped.generate(prompts, params)
    with pytest.raises(InvalidInputError, match=r"^the prompt has 64 tokens"):
        wrapped.generate([3] * 64, params[0])
    small = wrap(tiny_llama(), kv_cache_tokens=80)
    with pytest.raises(CacheTooSmallError, match=r"^prompt 0: 40 prompt tokens and 60 new ones need 100"):
        small.generate([[1] * 40, [2]], [SamplingParams(max_new_tokens=60), SamplingParams(max_new_tokens=2)])


def test_a_request_that_the_model_has_no_room_for_says_that_it_was_cut() -> None:
    model = wrap(tiny_llama(), table_head(tiny_llama()), num_speculative_tokens=3, max_model_len=20)
    prompt = random_prompts([9])[0]
    (cut,) = model.generate(prompt, max_new_tokens=100)
    assert (cut.finish_reason, cut.truncated_by, len(cut.token_ids)) == ("length", "max_model_len", 11)
    for params in (SamplingParams(max_new_tokens=11), SamplingParams(max_new_tokens=11, strict_length=True)):
        (whole,) = model.generate(prompt, params)
        assert (whole.finish_reason, whole.truncated_by) == ("length", None) and whole.token_ids == cut.token_ids
    (ended,) = model.generate(prompt, max_new_tokens=100, stop_token_ids=[cut.token_ids[4]])
    assert (ended.finish_reason, ended.truncated_by) == ("stop", None)
    message = (
        "max_new_tokens=12 after a prompt of 9 tokens: with max_model_len=20 there is room for 11; lower max_new_tok"
    )
    with pytest.raises(InvalidInputError, match=message):
        model.generate(prompt, max_new_tokens=12, strict_length=True)
    with pytest.raises(InvalidInputError, match="strict_length=1: allowed are True and False"):
        SamplingParams(strict_length=1)  # type: ignore[arg-type]
