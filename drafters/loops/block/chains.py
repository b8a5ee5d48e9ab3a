"""How the drafts of a block depend on each other: not at all (DFlash), or each on the one before it (DSpark, DFlash2).

All slots have logits from one pass; the chain then goes over them from left to right and adds a bias that depends on
the draft before, to all of them or to the largest few. So q of draft k is that of the drafted predecessor. Drafts are
mapped to target ids before the next look-up.

Source: deepseek-ai/DeepSpec, deepspec/modeling/dspark (arithmetic of the variants); DSpark, arXiv 2607.05147;
z-lab/dflash, dflash/model.py (CandidateSelector).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from drafters.base import BlockHead
from drafters.loops.base import BlockChain, Choose, Draft, Stepped


class Independent:
    """Every slot by itself; a `drafters.loops.base.BlockChain`."""

    def step(self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        return logits, None


class Markov(nn.Module):
    """A bias of low rank from the token before: W2·W1[previous]; a `drafters.loops.base.BlockChain`."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, width: int) -> None:
        """vocab_size: V of the tokens before. draft_vocab_size: Vd of the logits. width: r."""
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, width)
        self.markov_w2 = nn.Linear(width, draft_vocab_size, bias=False)

    def step(self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None) -> Stepped:
        before, state = self._before(self.markov_w1(previous), hidden, state)
        return logits + self.markov_w2(before), state

    def _before(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> Stepped:
        """embedded [R, r] of the token before, hidden [R, H] -> what W2 reads [R, r], and the next state."""
        return embedded, state


class GatedMarkov(Markov):
    """The token before is weighed by a gate that reads the slot's output."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, width: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, hidden_size, width)
        self.gate_proj = nn.Linear(hidden_size + width, width)

    def _before(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> Stepped:
        return embedded * torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), -1))), state


class RnnMarkov(Markov):
    """All tokens before, by a state of width r that begins at 0 in every block."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, width: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, hidden_size, width)
        self.joint_proj = nn.Linear(2 * width + hidden_size, 3 * width)

    def _before(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


MARKOVS = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RnnMarkov}
"""By the name that configurations give them."""


class Selector(nn.Module):
    """A slot's draft is one of its most probable ids, by their logits and a bias of low rank from the token before.

    The bias of b after a is <A[a]·P(hidden), B[b]>. A `drafters.loops.base.BlockChain`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, width: int, top_k: int) -> None:
        """width: r, of A, B and P. top_k: ids of a slot that can be drafted."""
        super().__init__()
        self._top_k = top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, width)
        self.successor_codebook = nn.Embedding(vocab_size, width)
        self.hidden_projection = nn.Linear(hidden_size, width, bias=False)

    def step(self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        """All other ids get -inf, so that q is zero there."""
        own, ids = logits.topk(self._top_k, -1)  # [R, k]
        before = self.predecessor_codebook(previous) * self.hidden_projection(hidden)  # [R, r]
        scores = own + (self.successor_codebook(ids) @ before[:, :, None])[:, :, 0]
        return torch.full_like(logits, -math.inf, dtype=scores.dtype).scatter(-1, ids, scores), None


def drafts_along(head: BlockHead, x: Tensor, bonus: Tensor, num_drafts: int, choose: Choose) -> Draft:
    """Drafts 1 … num_drafts from the outputs x [R, Q, H] of whole blocks; bonus: [R] int64 tokens."""
    token_ids, probs = list[Tensor](), list[Tensor | None]()

    def draft(slot: int, logits: Tensor) -> Tensor:
        ids, q = choose(slot, logits)
        token_ids.append(head.to_target_ids(ids))
        probs.append(q)
        return token_ids[-1]

    go_along(head, x, bonus, num_drafts, draft)
    return Draft.of(token_ids, probs)


def drafting_slots(head: BlockHead, x: Tensor, num_drafts: int) -> Tensor:
    """Outputs [R, Q, H] of whole blocks -> [R, n, H] of the slots that give drafts 1 … n."""
    return x[:, head.first_slot : head.first_slot + num_drafts]


def go_along(
    head: BlockHead, x: Tensor, bonus: Tensor, num_drafts: int, draft: Callable[[int, Tensor], Tensor]
) -> None:
    """Make drafts 1 … num_drafts from the outputs x [R, Q, H] of whole blocks.

    The slots behind the last draft are dropped.

    Args:
        bonus: [R] int64 tokens. draft: chooses draft j+1: (j from 0, draft logits [R, Vd]) -> [R] int64 target ids.
    """
    hidden = drafting_slots(head, x, num_drafts).transpose(0, 1)  # [n, R, H]
    logits = head.logits(hidden.flatten(0, 1)).view(num_drafts, len(bonus), -1)
    chain: BlockChain = head.chain
    state = None
    previous = bonus
    for slot in range(num_drafts):
        biased, state = chain.step(logits[slot], previous, hidden[slot], state)
        previous = draft(slot, biased)
