"""A block head's arithmetic by plain loops in float64, which share no code with the package."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import tiny_llama

from drafters.base import BlockHead, ChainHead
from drafters.oracle import oracle_drafts
from specdec.errors import HeadMismatchError, InvalidInputError
from tests.block_heads import DFLASH, DFLASH2, DSPARK, block_head

Rows = torch.Tensor


def normed(x: Rows, weight: Rows, eps: float) -> Rows:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Rows, positions: Rows, theta: float) -> Rows:
    """x [T, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def by_hand(head: Any, aux: Rows, bonus: int) -> Rows:
    """[Q, H] outputs of the block behind aux [L, A*Ht], position by position and head by head."""
    w, spec = {name: tensor.double() for name, tensor in head.state_dict().items()}, head.spec
    eps, q, kv, dim = spec.rms_norm_eps, spec.num_heads, spec.num_kv_heads, spec.head_dim
    f = normed(aux.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    length, size = len(aux), spec.block_size
    table = w["embed_tokens.weight"] if spec.own_embed else head.target_embedding.double()
    x = table[[bonus] + [spec.mask_token_id] * (size - 1)] * spec.embedding_scale
    at = torch.arange(length + size, dtype=torch.float64)
    for index in range(spec.num_layers):
        own = {name.removeprefix(f"layers.{index}."): t for name, t in w.items() if name.startswith(f"layers.{index}.")}
        y = normed_y = normed(x, own["input_layernorm.weight"], eps)
        if spec.conv_kernel_size:
            y = convolved(y, normed_y, own, "attention_conv", 0, spec)
        both = torch.cat([f, y])  # the states of the target are not normed here
        keys = normed((both @ own["self_attn.k_proj.weight"].T).view(-1, kv, dim), own["self_attn.k_norm.weight"], eps)
        keys, values = rotated(keys, at, spec.rope.theta), (both @ own["self_attn.v_proj.weight"].T).view(-1, kv, dim)
        queries = normed((y @ own["self_attn.q_proj.weight"].T).view(-1, q, dim), own["self_attn.q_norm.weight"], eps)
        queries, out = rotated(queries, at[length:], spec.rope.theta), torch.zeros(size, q, dim, dtype=torch.float64)
        for i in range(size):
            seen = [j for j in range(length + size) if sees(spec, index, length + i, j)]
            for h in range(q):
                scores = torch.stack([queries[i, h] @ keys[j, h * kv // q] / math.sqrt(dim) for j in seen])
                out[i, h] = sum(p * values[j, h * kv // q] for p, j in zip(scores.softmax(0), seen, strict=True))
        attended = out.flatten(1) @ own["self_attn.o_proj.weight"].T
        if spec.conv_kernel_size:
            attended = convolved(attended, normed_y, own, "attention_conv", 1, spec)
        x = x + attended
        y = normed_y = normed(x, own["post_attention_layernorm.weight"], eps)
        if spec.conv_kernel_size:
            y = convolved(y, normed_y, own, "mlp_conv", 0, spec)
        gate = y @ own["mlp.gate_proj.weight"].T
        y = (gate * gate.sigmoid() * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        x = x + (convolved(y, normed_y, own, "mlp_conv", 1, spec) if spec.conv_kernel_size else y)
    return normed(x, w["norm.weight"], eps)


def convolved(x: Rows, by: Rows, own: dict[str, Rows], name: str, side: int, spec: Any) -> Rows:
    """x [Q, H], slot by slot and channel by channel; by: [Q, H] what the corrections come from."""
    base, weight, out = own[f"{name}.base_kernel"][side], own[f"{name}.kernel_projection.weight"], torch.zeros_like(x)
    for slot in range(len(x)):
        corrections = (weight @ by[slot]).view(2, spec.conv_kernel_size, -1)[side]
        for channel in range(x.shape[1]):
            for back in range(min(spec.conv_kernel_size, slot + 1)):
                kernel = base[back, channel] + corrections[back, channel // spec.conv_group_size]
                out[slot, channel] += kernel * x[slot - back, channel]
    return out


def walked(head: Any, x: Rows, bonus: int) -> list[int]:
    """The most probable draft of every slot x [n, H] after the one before it, by plain loops over the ids."""
    found, previous, spec = [], bonus, head.spec
    before, after, gate = (w.double() for w in head.candidate_selector.state_dict().values())
    for hidden, logits in zip(x, (x @ head.target_lm_head.double().T).tolist(), strict=True):
        ids = sorted(range(spec.vocab_size), key=lambda b: -logits[b])[: spec.selector_top_k]
        read = (before[previous] * (gate @ hidden)).tolist()
        edges = {b: logits[b] + sum(a * c for a, c in zip(read, after[b].tolist(), strict=True)) for b in ids}
        previous = max(edges, key=edges.__getitem__)
        found.append(previous)
    return found


def sees(spec: Any, layer: int, query: int, key: int) -> bool:
    if layer in spec.causal_layers and key > query:
        return False
    return layer not in spec.windowed_layers or abs(query - key) < spec.window


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windowed_layers": (0, 1), "window": 3, "causal_layers": (1,), "embedding_scale": 2.0},
        {"own_embed": True, "slots": "anchor-first", "block_size": 4, "causal_layers": (0, 1), "num_layers": 3},
    ],
)
def test_drafts_are_those_of_plain_loops(changes: dict[str, Any]) -> None:
    head = block_head(tiny_llama(), DFLASH, **changes)
    aux = torch.randn(9, 96, generator=torch.Generator().manual_seed(5))
    ids = torch.arange(10) * 3
    x = by_hand(head, aux, int(ids[-1]))[head.first_slot :]
    right = (x @ head.target_lm_head.double().T).argmax(-1).tolist()
    assert oracle_drafts(head, ids, aux, len(right)) == right


@pytest.mark.parametrize(
    "changes",
    [{}, {"conv_kernel_size": 4, "conv_group_size": 8, "selector_top_k": 3, "windowed_layers": (0,), "window": 3}],
)
def test_convolutions_and_selector_are_those_of_plain_loops(changes: dict[str, Any]) -> None:
    head = block_head(tiny_llama(), DFLASH2, **changes)
    aux = torch.randn(9, 96, generator=torch.Generator().manual_seed(5))
    ids = torch.arange(10) * 3
    x = by_hand(head, aux, int(ids[-1]))[1:]
    right = walked(head, x, int(ids[-1]))
    assert oracle_drafts(head, ids, aux, len(right)) == right
    assert (x @ head.target_lm_head.double().T).argmax(-1).tolist() != right, "the selector changes drafts"


def test_logits_are_scaled_then_capped() -> None:
    head = block_head(tiny_llama(), DFLASH, logit_scale=0.5, logit_softcap=3.0)
    x = torch.randn(4, 32)
    plain = x @ head.target_lm_head.T
    assert torch.allclose(head.logits(x), 3 * torch.tanh(plain / 6), atol=1e-5)


@pytest.mark.parametrize("confidence", ["outputs", "outputs and tokens"])
def test_confidence_is_that_of_plain_loops(confidence: str) -> None:
    """Of a head with a gate: the Markov head's embeddings are read as they are, before it."""
    head = block_head(tiny_llama(), DSPARK, markov="gated", markov_rank=3, confidence=confidence)
    x, previous = torch.randn(2, 4, 32), torch.tensor([[1, 5, 60, 5], [0, 63, 2, 3]])
    weight, bias = (w.tolist() for w in head.confidence_head.state_dict().values())
    found = head.confidence_logits(x, previous)
    assert found.shape == (2, 4) and found.dtype == torch.float32
    for row in range(2):
        for slot in range(4):
            read = x[row, slot].tolist()
            if confidence != "outputs":
                read += head.markov_head.markov_w1.weight[previous[row, slot]].tolist()
            expected = bias[0] + sum(a * b for a, b in zip(weight[0], read, strict=True))
            assert float(found[row, slot]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("slots", ["fill-in", "anchor-first"])
def test_log_odds_are_divided_by_the_temperature_of_their_slot(slots: str) -> None:
    """Also of fewer drafts than a block gives; temperatures of 1 change nothing."""
    head = block_head(tiny_llama(), DSPARK, slots=slots, confidence="outputs and tokens")
    most = head.block_size - head.first_slot
    x = torch.randn(3, head.block_size, 32, generator=torch.Generator().manual_seed(4))
    drafts = torch.arange(3 * most).view(3, most)
    bonus, before = drafts[:, 0] + 30, torch.cat((drafts[:, :1] + 30, drafts[:, :-1]), 1)
    plain = head.confidence_logits(x[:, head.first_slot :], before)
    wanted = torch.linspace(0.5, 4, most)
    head.calibrate(tuple(wanted.tolist()))
    assert head.spec.confidence_temperatures == (1.0,) * head.first_slot + tuple(wanted.tolist())
    for count in (2, most):
        own = x[:, head.first_slot : head.first_slot + count]
        torch.testing.assert_close(head.confidence_logits(own, before[:, :count]), plain[:, :count] / wanted[:count])
        scores = (plain / wanted).sigmoid().flatten().sort().values
        least = float(scores[len(scores) // 2 :][:2].mean())
        kept = ((plain / wanted)[:, :count].sigmoid() >= least).cumprod(1).sum(1)
        assert torch.equal(head.num_confident(least, x, bonus, drafts[:, :count]), kept)
    head.calibrate((1.0,) * most)
    assert torch.equal(head.confidence_logits(x[:, head.first_slot :], before), plain)


def test_it_drafts_in_blocks_and_in_no_chain() -> None:
    head = block_head(tiny_llama(), DSPARK)
    assert isinstance(head, BlockHead) and not isinstance(head, ChainHead)
    assert not any("target" in name for name in head.state_dict()), "shared tensors are no part of its checkpoint"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 257}, "block_size=257: allowed are 2 … 256"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"markov": "vanilla", "markov_rank": 0}, "a Markov head 'vanilla' of rank 0"),
        ({"windowed_layers": (5,), "window": 3}, "a sliding window of 3 positions in layers"),
        ({"hidden_size": 16}, "needs its own embed_tokens"),
        ({"draft_vocab_size": 65}, "draft vocabulary 65 exceeds"),
        ({"num_heads": 0}, "num_heads of a block-parallel head must be"),
        (
            {"conv_kernel_size": 2},
            "over 2 slots with groups of 0 channels: allowed are",
        ),
        ({"conv_kernel_size": 7, "conv_group_size": 16}, "over 7 slots .* 1 … 6"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "groups of 5 channels.* divides the hidden size 32"),
        ({"conv_kernel_size": 2, "conv_group_size": -16}, "groups of -16 channels"),
        ({"selector_rank": 4}, "a selector of rank 4 from 0 ids of a slot: allowed are 1 … 64"),
        ({"selector_rank": 4, "selector_top_k": 65}, "from 65 ids"),
        ({"selector_rank": -1, "selector_top_k": 4}, "a selector of rank -1"),
        ({"selector_rank": 4, "selector_top_k": 4, "markov": "rnn", "markov_rank": 2}, "without a Markov head"),
        (
            {"selector_rank": 4, "selector_top_k": 4, "draft_vocab_size": 32, "own_lm_head": True},
            "without a reduced draft vocabulary",
        ),
    ],
)
def test_specs_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    spec = block_head(tiny_llama(), DFLASH).spec
    with pytest.raises(InvalidInputError, match=message):
        replace(spec, **changes)


def test_a_target_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(HeadMismatchError, match="embedding has 64 rows of width 32, the head was made for 63"):
        block_head(tiny_llama(), DFLASH, vocab_size=63, draft_vocab_size=63)
