"""Chains over a block's slots: every variant by plain loops, q of the drafted predecessor, a reduced vocabulary."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.loops.block.chains import MARKOVS, Independent, Selector, drafts_along

V, H, R = 7, 5, 3


def chain(kind: str, draft_vocab_size: int = V) -> Any:
    torch.manual_seed(2)
    return MARKOVS[kind](V, draft_vocab_size, H, R).double().requires_grad_(False)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(own: Any, kind: str, logits: torch.Tensor, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
    """[n, Vd] logits of the slots after the drafts `tokens`, the first of which is the bonus token."""
    state, found = [0.0] * R, []
    for slot, token in enumerate(tokens):
        w1, h = own.markov_w1.weight[token].tolist(), hidden[slot].tolist()
        read = w1
        if kind == "gated":
            rows = zip(own.gate_proj.weight.tolist(), own.gate_proj.bias.tolist(), w1, strict=True)
            read = [w * sigmoid(sum(a * b for a, b in zip(row, h + w1, strict=True)) + bias) for row, bias, w in rows]
        elif kind == "rnn":
            rows = zip(own.joint_proj.weight.tolist(), own.joint_proj.bias.tolist(), strict=True)
            joint = [sum(a * b for a, b in zip(row, state + w1 + h, strict=True)) + bias for row, bias in rows]
            gates = [sigmoid(x) for x in joint[:R]]
            read = [math.tanh(x) for x in joint[2 * R :]]
            state = [g * s + (1 - g) * math.tanh(c) for g, s, c in zip(gates, state, joint[R : 2 * R], strict=True)]
        biases = [sum(a * b for a, b in zip(row, read, strict=True)) for row in own.markov_w2.weight.tolist()]
        found.append([u + b for u, b in zip(logits[slot].tolist(), biases, strict=True)])
    return torch.tensor(found, dtype=torch.float64)


def head_of(own: Any, logits: torch.Tensor, first_slot: int = 0, ids: torch.Tensor | None = None) -> Any:
    """A head whose slot j of row r has the logits [R, Q, Vd], wherever its output says so."""
    flat = logits.flatten(0, 1)
    read = lambda x: flat[x[:, 0].long()]  # noqa: E731
    return SimpleNamespace(
        chain=own, first_slot=first_slot, logits=read, to_target_ids=lambda d: d if ids is None else ids[d]
    )


def outputs(rows: int, slots: int) -> torch.Tensor:
    """[R, Q, H] outputs, of which the first number is the slot's place in `head_of`."""
    x = torch.randn(rows, slots, H, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x[:, :, 0] = torch.arange(rows * slots).view(rows, slots)
    return x


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("kind", MARKOVS)
def test_every_draft_depends_on_the_draft_before(kind: str, first_slot: int) -> None:
    own, slots, count = chain(kind), 5, 4
    logits = torch.randn(2, slots, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x, bonus, seen = outputs(2, slots), torch.tensor([6, 1]), list[torch.Tensor]()

    def choose(slot: int, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert slot == len(seen)
        seen.append(scores)
        return (scores.argmax(-1) + slot) % V, scores.softmax(-1)  # not the arg max: what was drafted counts

    draft = drafts_along(head_of(own, logits, first_slot), x, bonus, count, choose)
    assert draft.probs is not None and draft.token_ids.shape == (2, count)
    for row in range(2):
        before = [int(bonus[row]), *draft.token_ids[row, :-1].tolist()]
        own_slots = slice(first_slot, first_slot + count)
        right = by_hand(own, kind, logits[row, own_slots], before, x[row, own_slots])
        assert torch.allclose(torch.stack(seen, 1)[row], right, atol=1e-12)
        assert torch.allclose(draft.probs[row], right.softmax(-1), atol=1e-12)
        other = by_hand(own, kind, logits[row, own_slots], [before[0]] * count, x[row, own_slots])
        assert not torch.allclose(right, other), "with the bonus token as every predecessor it differs"


@pytest.mark.parametrize("kind", MARKOVS)
def test_ids_of_a_reduced_vocabulary_are_mapped_before_the_next_look_up(kind: str) -> None:
    own, ids = chain(kind, 4), torch.tensor([1, 2, 5, 6])
    logits = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x, seen = outputs(1, 4), list[torch.Tensor]()

    def choose(slot: int, scores: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append(scores[0])
        return torch.tensor([3 - slot]), None

    draft = drafts_along(head_of(own, logits, ids=ids), x, torch.tensor([0]), 4, choose)
    assert draft.token_ids.tolist() == [[6, 5, 2, 1]] and draft.probs is None
    assert torch.allclose(torch.stack(seen), by_hand(own, kind, logits[0], [0, 6, 5, 2], x[0]), atol=1e-12)


def edges_by_hand(own: Any, top_k: int, logits: torch.Tensor, previous: int, hidden: torch.Tensor) -> dict[int, float]:
    """The scores of a slot's most probable ids after `previous`."""
    ids = sorted(range(V), key=lambda b: -logits[b])[:top_k]
    a, h = own.predecessor_codebook.weight[previous].tolist(), hidden.tolist()
    gate = [sum(w * x for w, x in zip(row, h, strict=True)) for row in own.hidden_projection.weight.tolist()]
    after = own.successor_codebook.weight.tolist()
    return {b: float(logits[b]) + sum(x * y * z for x, y, z in zip(a, gate, after[b], strict=True)) for b in ids}


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, V])
def test_a_selectors_q_lies_on_few_ids_and_depends_on_what_was_drawn(
    top_k: int, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the next slot reads the most probable draft in place of the drawn one."""
    torch.manual_seed(2)
    own, first, count = Selector(V, H, R, top_k).double().requires_grad_(False), 1, 4
    logits = torch.randn(2, 5, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x, bonus, seen = outputs(2, 5), torch.tensor([6, 1]), list[torch.Tensor]()

    def choose(slot: int, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(scores)
        return scores.topk(min(2, top_k), -1).indices[:, -1], scores.softmax(-1)

    if planted:
        plain, best = Selector.step, list[torch.Tensor]()

        def step(self: Any, logits: torch.Tensor, previous: torch.Tensor, *rest: Any) -> Any:
            found = plain(self, logits, best[-1] if best else previous, *rest)
            best.append(found[0].argmax(-1))
            return found

        monkeypatch.setattr(Selector, "step", step)
    draft = drafts_along(head_of(own, logits, first), x, bonus, count, choose)
    assert draft.probs is not None
    same = []
    for row in range(2):
        before = [int(bonus[row]), *draft.token_ids[row, :-1].tolist()]
        for slot, previous in enumerate(before):
            edges = edges_by_hand(own, top_k, logits[row, first + slot], previous, x[row, first + slot])
            right = torch.tensor([edges.get(b, -math.inf) for b in range(V)], dtype=torch.float64)
            same.append(torch.allclose(seen[slot][row], right, atol=1e-12))
            assert int((draft.probs[row, slot] > 0).sum()) == top_k
    assert all(same) == (not planted or top_k == 1)


def test_without_a_chain_slots_are_chosen_by_themselves() -> None:
    logits = torch.randn(2, 5, V)
    draft = drafts_along(
        head_of(Independent(), logits, 1), outputs(2, 5), torch.tensor([3, 3]), 3, lambda _, s: (s.argmax(-1), None)
    )
    assert torch.equal(draft.token_ids, logits[:, 1:4].argmax(-1))


def test_a_state_does_not_outlive_its_block() -> None:
    own, logits = chain("rnn"), torch.randn(1, 4, V, dtype=torch.float64)
    twice = [
        drafts_along(head_of(own, logits), outputs(1, 4), torch.tensor([2]), 4, lambda _, s: (s.argmax(-1), s))
        for _ in range(2)
    ]
    assert torch.equal(*(draft.probs for draft in twice if draft.probs is not None))
