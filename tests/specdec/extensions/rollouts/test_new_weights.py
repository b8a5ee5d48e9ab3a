"""New weights from outside: copied in place, checked first, seen by the next rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import eagle3_head, free_everywhere, hf_greedy, table_head, tiny_llama, wrap

from specdec.engine.engine import Engine
from specdec.errors import InvalidInputError
from specdec.requests.sampling import SamplingParams

PROMPT, GREEDY = [5, 9, 2, 40, 7, 1, 33, 8, 5, 9, 2, 40, 7, 1, 33, 8, 4], SamplingParams(8)


def new_weights() -> dict[str, torch.Tensor]:
    return tiny_llama(seed=5).state_dict()


def tokens(wrapped: Any) -> list[int]:
    return list(wrapped.generate([PROMPT], GREEDY)[0].token_ids)


@pytest.mark.parametrize("given", ["mapping", "list", "iterator", "in bfloat16"])
@pytest.mark.cases(1)
def test_the_next_rollout_is_of_the_new_weights(given: str) -> None:
    """Though the prompt's pages were cached."""
    model = tiny_llama()
    places = [p.data_ptr() for p in model.parameters()]
    wrapped = wrap(model, table_head(model), num_speculative_tokens=3)
    assert tokens(wrapped) == tokens(wrapped) == hf_greedy(PROMPT, 8)
    new: Any = new_weights()
    right = hf_greedy(PROMPT, 8, seed=5)
    if given == "in bfloat16":
        new = {name: tensor.bfloat16() for name, tensor in new.items()}
        other = tiny_llama(seed=5)
        other.load_state_dict(new)
        ids = torch.tensor([PROMPT])
        right = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0]
        right = right[len(PROMPT) :].tolist()
    before = wrapped.self_test_error
    found = wrapped.update_weights({"list": list(new.items()), "iterator": iter(new.items())}.get(given, new))
    assert found == wrapped.self_test_error != before
    assert tokens(wrapped) == right != hf_greedy(PROMPT, 8) and free_everywhere(wrapped)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_a_planted_stale_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the old weights give other tokens: what the test before would see."""
    model = tiny_llama()
    wrapped = wrap(model, None)
    tokens(wrapped)
    monkeypatch.setattr(Engine, "check_weights", lambda self: None)
    monkeypatch.setattr(Engine, "forget_prefixes", lambda self: None)
    wrapped.update_weights(new_weights())
    assert wrapped.generate([PROMPT], GREEDY)[0].stats.cached_tokens == 16
    assert tokens(wrapped) != hf_greedy(PROMPT, 8, seed=5)


def test_part_of_the_weights_and_the_heads() -> None:
    model = tiny_llama()
    head = eagle3_head(model)
    wrapped = wrap(model, head, num_speculative_tokens=3)
    name, value = next((n, t) for n, t in head.state_dict().items() if "mlp" in n)
    drafts = wrapped.generate([PROMPT], replace(GREEDY, return_drafts=True))[0].drafts
    wrapped.update_weights({}, head={name: torch.randn_like(value)})
    other = wrapped.generate([PROMPT], replace(GREEDY, return_drafts=True))[0]
    assert other.token_ids == hf_greedy(PROMPT, 8) and other.drafts != drafts
    key = "model.layers.1.mlp.up_proj.weight"
    wrapped.update_weights([(key, new_weights()[key])])
    assert torch.equal(model.state_dict()[key], new_weights()[key])


def broken(kind: str) -> Iterator[tuple[Any, Any]]:
    items = list(new_weights().items())
    name, tensor = items[3]
    yield from items[:3]
    yield {
        "name": (name + "s", tensor),
        "shape": (name, tensor[:-1]),
        "kind": (name, tensor.long()),
        "item": name,
        "no text": (3, tensor),
    }[kind]
    yield from items[4:]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("name", "it has no .*s' .near is"),
        ("shape", "has shape .*given is"),
        ("kind", "torch.float32, given is torch.int64"),
        ("item", r"item 3 is .*not a \(name, tensor\)"),
        ("no text", "it has no 3"),
    ],
)
@pytest.mark.cases(1)
def test_wrong_weights_are_named(kind: str, message: str) -> None:
    """A list is refused as a whole; of an iterator what came before is written, and the message says so."""
    model = tiny_llama()
    wrapped = wrap(model, None)
    with pytest.raises(InvalidInputError, match=message):
        wrapped.update_weights(list(broken(kind)))
    assert tokens(wrapped) == hf_greedy(PROMPT, 8)
    with pytest.raises(InvalidInputError, match=r"the 3 before it are written: .* mixture"):
        wrapped.update_weights(broken(kind))
    ids = torch.tensor([PROMPT])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert tokens(wrapped) == own[0, len(PROMPT) :].tolist()


def test_what_an_iterator_raises_is_told_with_how_many_were_written() -> None:
    """Also where the other module was written before."""

    def ends_early(count: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(new_weights().items())[:count]
        raise ConnectionError("the trainer is gone")

    model = tiny_llama()
    wrapped = wrap(model, eagle3_head(model), num_speculative_tokens=3)
    for count, left in ((0, "nothing was written"), (3, "the 3 before it are written: .* mixture .* not tested")):
        with pytest.raises(InvalidInputError, match=f"ConnectionError: the trainer is gone; {left}") as found:
            wrapped.update_weights(ends_early(count))
        assert isinstance(found.value.__cause__, ConnectionError)
    count = len(new_weights())
    with pytest.raises(InvalidInputError, match=f"'nope'.*the {count} before it are written"):
        wrapped.update_weights(new_weights(), head=iter([("nope", torch.zeros(1))]))
    wrapped.update_weights(new_weights())
    assert tokens(wrapped) == hf_greedy(PROMPT, 8, seed=5), "given again, they are all there"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, tensor: (name, tensor.to("meta")), "is on the meta device"),
        (lambda name, tensor: (name, tensor.to_sparse()), r"torch.sparse_coo: give a plain tensor .*to_dense"),
        (lambda name, tensor: (name, None), r"item 0 is \('model.norm.weight', None\), not a"),
        (lambda name, tensor: (f"base_model.model.{name}", tensor), "name of peft's; .*merge_and_unload"),
        (lambda name, tensor: ("model.layers.0.mlp.up_proj.lora_A.default.weight", tensor), "name of peft's"),
    ],
)
def test_tensors_without_values_and_names_of_adapters_are_refused_before_anything_is_written(
    change: Any, message: str
) -> None:
    model = tiny_llama()
    wrapped = wrap(model, None)
    name = "model.norm.weight"
    with pytest.raises(InvalidInputError, match=f"{message}.*nothing was written"):
        wrapped.update_weights([change(name, new_weights()[name])])
    with pytest.raises(InvalidInputError, match="nothing was written"):
        wrapped.update_weights([*new_weights().items(), change(name, new_weights()[name])])
    assert tokens(wrapped) == hf_greedy(PROMPT, 8)


def test_a_wrong_name_of_the_heads_leaves_the_target_as_it_was() -> None:
    model = tiny_llama()
    wrapped = wrap(model, eagle3_head(model), num_speculative_tokens=3)
    with pytest.raises(InvalidInputError, match=r"'nope'.*nothing was written"):
        wrapped.update_weights(new_weights(), head={"nope": torch.zeros(1)})
    assert tokens(wrapped) == hf_greedy(PROMPT, 8)


def test_what_is_refused() -> None:
    model = tiny_llama()
    wrapped = wrap(model, None)
    with pytest.raises(InvalidInputError, match="no weights were given"):
        wrapped.update_weights({})
    with pytest.raises(InvalidInputError, match="drafts without a head"):
        wrapped.update_weights(new_weights(), head=new_weights())
    stream = wrapped.stream([PROMPT], GREEDY)
    next(stream)
    with pytest.raises(InvalidInputError, match=r"requests are running .* before update_weights\(\)"):
        wrapped.update_weights(new_weights())
    assert [u.completion.token_ids for u in stream if u.completion] == [hf_greedy(PROMPT, 8)]
