"""The draft oracle recomputes everything: compared with the head run token by token; it sees one changed state."""

from __future__ import annotations

import pytest
import torch
from fakes import eagle3_head, random_prompts, table_head, tiny_llama

from drafters.base import Head
from drafters.oracle import oracle_drafts
from tests.oracles import last_position_alone

HEADS = {"table": table_head, "reduced": lambda m: table_head(m, known=range(1, 64, 3)), "eagle3": eagle3_head}


def aux_hidden_states_of(head: Head, ids: list[int]) -> torch.Tensor:
    """[L, A·Ht] true states of a sequence, from transformers' own hidden states."""
    with torch.no_grad():
        states = tiny_llama(context=0.35)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in head.aux_layers], -1)


def one_by_one(head: Head, ids: list[int], aux_hidden_states: torch.Tensor, num: int) -> list[int]:
    """The same drafts from a head that reads one token a pass and keeps K and V in a list."""
    memory: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        memory.append((k[0], v[0]))
        key = head.attention_specs[layer]
        groups = key.num_q_heads // key.num_kv_heads
        keys = torch.stack([m[0] for m in memory]).repeat_interleave(groups, 1)  # [S, Hq, D]
        values = torch.stack([m[1] for m in memory]).repeat_interleave(groups, 1)
        weights = (torch.einsum("hd,shd->hs", q[0], keys) * key.scale).softmax(-1)
        return torch.einsum("hs,shd->hd", weights, values)[None]

    x = torch.empty(0)
    for position, token in enumerate(ids[1:]):
        hidden = head.fuse(aux_hidden_states[position : position + 1])
        x = head.forward(torch.tensor([token]), hidden, torch.tensor([position]), attend)
    drafts: list[int] = []
    for position in range(len(ids) - 1, len(ids) - 1 + num):
        drafts.append(int(head.to_target_ids(head.logits(x).argmax(-1))[0]))
        x = head.forward(torch.tensor(drafts[-1:]), head.feedback(x), torch.tensor([position]), attend)
    return drafts


@pytest.mark.parametrize("name", HEADS)
def test_the_oracle_agrees_with_a_head_read_token_by_token(name: str) -> None:
    head = HEADS[name](tiny_llama(context=0.35))
    for ids in random_prompts([2, 7, 23], seed=5):
        aux_hidden_states = aux_hidden_states_of(head, ids[:-1])
        right = one_by_one(head, ids, aux_hidden_states, 4)
        assert oracle_drafts(head, torch.tensor(ids), aux_hidden_states, 4) == right
        assert oracle_drafts(head, torch.tensor(ids), aux_hidden_states, 2) == right[:2]
        with last_position_alone():
            assert oracle_drafts(head, torch.tensor(ids), aux_hidden_states, 4) == right


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.cases(1)
def test_the_oracle_depends_on_every_true_state(name: str) -> None:
    head = HEADS[name](tiny_llama(context=0.35))
    changed = 0
    for ids in random_prompts([12] * 10, seed=6):
        aux_hidden_states = aux_hidden_states_of(head, ids[:-1])
        broken = aux_hidden_states.clone()
        broken[4] = 0
        changed += oracle_drafts(head, torch.tensor(ids), aux_hidden_states, 5) != oracle_drafts(
            head, torch.tensor(ids), broken, 5
        )
    assert changed >= 2


def test_no_drafts_asked_none_given() -> None:
    head = table_head(tiny_llama())
    assert oracle_drafts(head, torch.tensor([3, 4]), aux_hidden_states_of(head, [3]), 0) == []
