"""Handoffs that somebody has changed: each is refused by name before anything is read, or served; all goes on."""

from __future__ import annotations

import copy
import gc
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import free_everywhere, random_prompts, table_head, tiny_llama, wrap

from specdec import Handoff, SamplingParams
from specdec.errors import HandoffMismatchError, InvalidInputError, SpecdecError

SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_model_len": 64, "kv_cache_tokens": 200}
PROMPT = random_prompts((9,))[0]
PARAMS = SamplingParams(max_new_tokens=6, temperature=0.8, seed=3)
VALUES = [-1, 1.5, float("nan"), 2**31, 2**63, 2**80, "", "x", None, True, [], [-1], [[]], ["a"], {"a": 1}]
START = len(b"specdec handoff\n")
SERVED = {"expires", "moved", "blocks", "completion", "tensors", "lease", "version"}
"""What a header has beside the source: nothing of it is left out below."""


def model() -> Any:
    return wrap(tiny_llama(), table_head(tiny_llama(), known=range(0, 64, 2), aux_layers=(1, 2, 3)), **SIZES)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    p, d = model(), model()
    p.open_transfer("local")
    d.open_transfer("local")
    return p, d


def parted(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, the source's table, and the tensors' bytes."""
    end = START + 8 + int.from_bytes(data[START : START + 8], "little")
    header = json.loads(data[START + 8 : end])
    return header, json.loads(header["source"]), data[end:]


def joined(header: dict[str, Any], source: dict[str, Any], rest: bytes) -> bytes:
    text = json.dumps(header | {"source": json.dumps(source)}).encode()
    return b"specdec handoff\n" + len(text).to_bytes(8, "little") + text + rest


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a tree of JSON; of lists the first and the last."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value)
    elif isinstance(value, list):
        inner = sorted({0, len(value) - 1}) if value else []
    for key in inner:
        yield (*place, key)
        yield from places(value[key], (*place, key))


def changed(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    own = copy.deepcopy(tree)
    inner = own
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return own


def served(d: Any, data: bytes) -> bool:
    """Whether a handoff is served; False where it is refused by name. Everything else is a failure."""
    try:
        d.resume(Handoff.from_bytes(data), timeout=2.0)
    except SpecdecError as error:
        assert type(error).__name__ != "RequestFailedError", "a round was ended"
        return False
    return True


def fresh(p: Any) -> bytes:
    (handoff,) = p.prefill(PROMPT, PARAMS)
    return bytes(handoff.to_bytes())


@pytest.mark.slow
@pytest.mark.thorough
def test_every_value_is_checked(pair: tuple[Any, Any]) -> None:
    p, d = pair
    data = fresh(p)
    header, source, rest = parted(data)
    assert header.keys() == SERVED | {"source"}
    chosen = random.Random(1)
    refused = 0
    for tree, place in [(0, at) for at in places(header) if at != ("source",)] + [(1, at) for at in places(source)]:
        for value in chosen.sample(VALUES, 4):
            own = [header, source]
            own[tree] = changed(own[tree], place, value)
            if served(d, joined(own[0], own[1], rest)):
                header, source, rest = parted(fresh(p))
            else:
                refused += 1
    assert refused > 300
    assert d.generate(PROMPT, PARAMS)[0].token_ids == p.generate(PROMPT, PARAMS)[0].token_ids
    assert free_everywhere(d)


def test_changed_and_cut_off_bytes(pair: tuple[Any, Any]) -> None:
    p, d = pair
    data, chosen = fresh(p), random.Random(2)
    for _ in range(150):
        own = bytearray(data)
        for _ in range(chosen.choice([1, 1, 3, 20])):
            own[chosen.randrange(len(own))] = chosen.randrange(256)
        if served(d, bytes(own[: chosen.choice([len(own), chosen.randrange(len(own))])])):
            data = fresh(p)
    assert d.generate(PROMPT, PARAMS)[0].token_ids == p.generate(PROMPT, PARAMS)[0].token_ids
    assert free_everywhere(d)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("expires",), float("nan"), "expires=nan"),
        (("moved", "num_drafts"), -1, "num_drafts=-1"),
        (("moved", "variant"), "x", "variant='x'"),
        (("moved", "prompt_token_ids", 0), 1.5, "prompt_token_ids=1.5"),
        (("moved", "key"), 2**80, "key="),
        (("blocks", "target"), "12", "blocks of target='12'"),
    ],
)
def test_what_is_wrong_is_named(pair: tuple[Any, Any], place: tuple[Any, ...], value: Any, words: str) -> None:
    header, source, rest = parted(fresh(pair[0]))
    with pytest.raises(SpecdecError, match=words):
        Handoff.from_bytes(joined(changed(header, place, value), source, rest))


@pytest.mark.parametrize("given", [None, "specdec handoff", 5, [1, 2]])
def test_what_is_no_bytes_is_named(given: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"a handoff=.*: allowed is the bytes of Handoff.to_bytes"):
        Handoff.from_bytes(given)


def test_bytes_after_the_last_tensor_are_refused(pair: tuple[Any, Any]) -> None:
    data = fresh(pair[0])
    assert Handoff.from_bytes(memoryview(data)).to_bytes() == data
    with pytest.raises(SpecdecError, match="2 bytes more than its tensors have"):
        Handoff.from_bytes(data + b"xy")


def test_a_model_without_the_head_is_told_of_the_head(pair: tuple[Any, Any]) -> None:
    p, other = pair[0], wrap(tiny_llama(), **{**SIZES, "num_speculative_tokens": 0})
    other.open_transfer("local")
    (handoff,) = p.prefill([PROMPT], PARAMS)
    with pytest.raises(SpecdecError, match=r"^head: "):
        other.resume(handoff)
    with pytest.raises(SpecdecError, match=r"\d of the requests .* release\(handoff\)"):
        p.open_transfer("local")
    p.release(handoff)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Of other tests: whose finalizers would be called, and fail, where the stack is at its end."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_json_that_is_nested_too_deep_is_refused(no_garbage: None) -> None:
    text = b"[" * 200_000
    with pytest.raises(HandoffMismatchError, match="no handoff: RecursionError"):
        Handoff.from_bytes(b"specdec handoff\n" + len(text).to_bytes(8, "little") + text)
