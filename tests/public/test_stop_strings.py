"""Stop strings spelled in bytes and pieces: a request ends where the definition says, whatever K is.

The definition: with the first token after which `tokenizer.decode(new tokens, skip_special_tokens=True)`, without an
unfinished character at its end, contains the stop string. Real tokenizers, random models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import random_prompts, table_head, tiny_llama, wrap
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec import SamplingParams

NEW = 24
PROMPTS = random_prompts([5, 9, 7], seed=3)
EURO = "€".encode()


def fast(pieces: list[str], decoder: Any, **options: Any) -> Any:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces) <= 63
    tokenizer = Tokenizer(models.BPE(vocab, [], **options))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def llama2() -> Any:
    """Byte fallback: half of the vocabulary are bytes, of euros, newlines, letters and of nothing."""
    known = [*EURO, 0x0A, 0x20, 0x61, 0x62, 0xFF, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9]
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in known), "▁", "▁a", "ab", "a", "b", "▁▁", "é", "c", "€a"]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(pieces, decoder, byte_fallback=True, unk_token="<unk>")


def byte_level() -> Any:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    strings = [bytes([b]) for b in (*EURO, 0x0A, 0x20, 0x61, 0x62, 0x63, 0xC3, 0xA9)]
    strings += [b"ab", b"\xe2\x82", b"\x82\xac", b"b\xe2", b"\xaca", " a€".encode(), b"a\n"]
    return fast(["".join(letters[b] for b in s) for s in strings], decoders.ByteLevel())


def sentencepiece() -> Any:
    return fast(["▁", "▁a", "a", "b", "▁b", "▁▁a", ".", "é", "▁c"], decoders.Metaspace())


TOKENIZERS = {"llama2": llama2(), "byte_level": byte_level(), "sentencepiece": sentencepiece()}
STOPS = {
    "llama2": ["\n", "€", "\n\n", "ab", " a", "é", "a€", "😀", "b\n"],
    "byte_level": ["\n", "€", "ab", " a", "b€", "€a", "a\n", "é"],
    "sentencepiece": [" ", " a", "a b", "ab", ". ", "é", "  a"],
}


class Spread:
    """A tokenizer whose tokens are spread over the model's whole vocabulary."""

    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def _own(self, token_id: int) -> int:
        return token_id % len(self.tokenizer)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.tokenizer(text)["input_ids"]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        ids = [self._own(t) for t in token_ids]
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self._own(token_id)))


def naive(tokenizer: Any, ids: list[int], stop: str) -> tuple[list[int], str]:
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], skip_special_tokens=True)
        if stop in text.rstrip("\ufffd"):
            return ids[:n], text[: text.find(stop)]
    return ids, tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(
    scope="module",
    params=["sentencepiece", *(pytest.param(t, marks=pytest.mark.slow) for t in ("llama2", "byte_level"))],
)
def wrapped(request: pytest.FixtureRequest) -> tuple[str, Any]:
    model = tiny_llama()
    tokenizer = Spread(TOKENIZERS[request.param])
    head = table_head(model, disturbance=0.05)
    sizes = {"num_speculative_tokens": 5, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    return request.param, wrap(model, head, tokenizer=tokenizer, **sizes)


@pytest.mark.slow
@pytest.mark.cases(1)
def test_a_stop_string_ends_where_the_definition_says_whatever_k_is(wrapped: tuple[str, Any]) -> None:
    name, model = wrapped
    drawn = SamplingParams(max_new_tokens=NEW, temperature=1.5, num_speculative_tokens=0)
    ends = 0
    for seed in range(2):
        prompt = PROMPTS[seed % len(PROMPTS)]
        free = model.generate(prompt, replace(drawn, seed=seed))[0].token_ids
        greedy = model.generate(prompt, SamplingParams(max_new_tokens=NEW))[0].token_ids
        asked = [(stop, k) for stop in STOPS[name] for k in (0, 2, 5)]
        params = [SamplingParams(max_new_tokens=NEW, stop=stop, num_speculative_tokens=k) for stop, k in asked]
        params += [replace(drawn, seed=seed, stop=stop) for stop in STOPS[name]]
        right = [naive(model.tokenizer, greedy, stop) for stop, _ in asked]
        right += [naive(model.tokenizer, free, stop) for stop in STOPS[name]]
        found = model.generate([prompt] * len(params), params)
        for one, completion, expected in zip(params, found, right, strict=True):
            assert (completion.token_ids, completion.text) == expected, (one, name)
        ends += sum(len(tokens) < len(free) for tokens, _ in right[len(asked) :])
    assert ends > 3, "some requests did end at their stop string"


@pytest.mark.slow
@pytest.mark.cases(1)
def test_a_stream_is_the_text_of_its_completion(wrapped: tuple[str, Any]) -> None:
    name, model = wrapped
    for seed in range(6):
        prompt = PROMPTS[seed % len(PROMPTS)]
        for stop in [(), tuple(STOPS[name][:2]), ("<end>",), (STOPS[name][seed],)]:
            params = SamplingParams(max_new_tokens=NEW, temperature=1.5, seed=seed, stop=stop)
            shown, completion = "", None
            pieces = []
            for update in model.stream(prompt, params):
                pieces.append(update.text)
                completion = update.completion
            shown = "".join(pieces)
            assert completion is not None and shown == completion.text
            if completion.finish_reason == "length" or not stop:
                assert shown == model.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


@pytest.mark.slow
def test_special_tokens_may_be_part_of_a_stop_string() -> None:
    """Written out at their place; the text has none of the stop string's characters."""
    tokenizer = Spread(byte_level())
    end = len(tokenizer.tokenizer) - 1
    model = wrap(tiny_llama(), tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=60, temperature=3.0, seed=1)
    ids = model.generate(PROMPTS[0], params)[0].token_ids
    at = next(i for i, t in enumerate(ids) if t % (end + 1) == end and i > 2)
    before = tokenizer.decode(ids[:at], skip_special_tokens=True)
    before = before.rstrip("\ufffd")  # an unfinished character is not text
    stop = before[-1] + "<end>"
    (completion,) = model.generate(PROMPTS[0], SamplingParams(max_new_tokens=60, temperature=3.0, seed=1, stop=stop))
    assert completion.token_ids == ids[: at + 1] and completion.finish_reason == "stop"
    assert completion.text == before[:-1]
