"""What the head sees in training is what it sees when it drafts: the training-time test against a cache-less chain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import eagle3_spec
from hypothesis import given
from hypothesis import strategies as st

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from drafters.loops.base import Attend
from drafters.oracle import oracle_drafts
from drafters.training.objective import Batch, chain_mask, draft_targets, evaluate_batch
from drafters.unroll import TttAttend, shift_left, unroll
from drafters.vocab import most_frequent

SPEC = eagle3_spec(head_dim=8, vocab_size=300, draft_vocab_size=200)
VARIANTS = [SPEC, replace(SPEC, feedback="post_norm"), replace(SPEC, num_layers=2, qkv_bias=True)]
STEPS, LENGTH = 5, 14
ANCHORS = range(1, 9)


def make_head(spec: Eagle3Spec = SPEC) -> Eagle3Head:
    torch.manual_seed(3)
    d2t = most_frequent(torch.randint(0, 9, (spec.vocab_size,)), spec.draft_vocab_size)
    head = Eagle3Head(spec, torch.randn(spec.vocab_size, spec.hidden_size), d2t=d2t)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.5)
    return head.requires_grad_(False)


class Misaligned:
    """A head whose positions after step 0 are off, or whose aux hidden states come in another order."""

    def __init__(self, head: Eagle3Head, offset: int = 0, roll: int = 0) -> None:
        self.head, self.offset, self.roll, self.passes = head, offset, roll, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.head, name)

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(aux_hidden_states.roll(self.roll * self.head.spec.target_hidden_size, dims=-1))

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        self.passes += 1
        return self.head(token_ids, hidden, positions + (self.offset if self.passes > 1 else 0), attend)


def chains(head: Eagle3Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence per anchor a: random up to the bonus token a+1, then the head's own greedy drafts, without a cache.

    Returns token ids [B, S], aux hidden states [B, S, A·Ht] and the drafts [B, K].
    """
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(0, head.spec.vocab_size, (len(ANCHORS), LENGTH), generator=generator)
    aux_hidden_states = torch.randn(len(ANCHORS), LENGTH, head.spec.aux_size, generator=generator)
    drafts = torch.tensor(
        [
            oracle_drafts(head, token_ids[b, : a + 2], aux_hidden_states[b, : a + 1], STEPS)
            for b, a in enumerate(ANCHORS)
        ]
    )
    for b, a in enumerate(ANCHORS):
        fitting = min(STEPS, LENGTH - a - 2)
        token_ids[b, a + 2 : a + 2 + fitting] = drafts[b, :fitting]
    return token_ids, aux_hidden_states, drafts


def trained_drafts(
    head: Eagle3Head | Misaligned, token_ids: torch.Tensor, aux_hidden_states: torch.Tensor
) -> torch.Tensor:
    """First choice of every training-time step in each sequence's anchor row [B, K]."""
    outputs = unroll(head, token_ids, aux_hidden_states, STEPS)  # type: ignore[arg-type]
    choices = [head.to_target_ids(head.logits(x).argmax(-1)).view(token_ids.shape) for x in outputs]
    rows = torch.arange(len(ANCHORS))
    return torch.stack([choice[rows, torch.tensor(ANCHORS)] for choice in choices], dim=1)


@pytest.mark.parametrize("spec", VARIANTS)
def test_training_sees_the_chains_that_drafting_makes(spec: Eagle3Spec) -> None:
    head = make_head(spec)
    token_ids, aux_hidden_states, drafts = chains(head)
    assert len(set(drafts.flatten().tolist())) > 10  # the head is no constant
    assert torch.equal(trained_drafts(head, token_ids, aux_hidden_states), drafts)


@pytest.mark.parametrize("defect", [{"offset": 1}, {"offset": -1}, {"roll": 1}])
def test_misaligned_training_is_seen(defect: dict[str, int]) -> None:
    head = make_head()
    token_ids, aux_hidden_states, drafts = chains(head)
    assert not torch.equal(trained_drafts(Misaligned(head, **defect), token_ids, aux_hidden_states), drafts)


def test_aligned_wrapper_is_not_the_cause() -> None:
    head = make_head()
    token_ids, aux_hidden_states, drafts = chains(head)
    assert torch.equal(trained_drafts(Misaligned(head), token_ids, aux_hidden_states), drafts)


def test_rows_never_see_what_comes_after_their_chain() -> None:
    head = make_head()
    token_ids, aux_hidden_states, _ = chains(head)
    changed_ids, changed = token_ids.clone(), aux_hidden_states.clone()
    changed_ids[:, 9:] = 0
    changed[:, 4:] += 1.0
    before, after = (unroll(head, *case, STEPS) for case in ((token_ids, aux_hidden_states), (changed_ids, changed)))
    for x, y in zip(before, after, strict=True):  # rows up to 3 read tokens up to 3+1+4
        x, y = x.view(*token_ids.shape, -1), y.view(*token_ids.shape, -1)
        assert torch.allclose(x[:, :4], y[:, :4], atol=1e-6)
        assert not torch.allclose(x[:, 4:8], y[:, 4:8], atol=1e-3)


def test_windows_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="windows"):
        TttAttend((AttentionSpec(2, 1, 4, 4, 0.5, window=3),), 1, 4)


@given(st.integers(1, 6), st.integers(0, 8))
def test_shift_left_takes_row_p_from_p_plus_by(length: int, by: int) -> None:
    x = torch.arange(1, length + 1)[None]
    assert shift_left(x, by).tolist() == [[p + by + 1 if p + by < length else 0 for p in range(length)]]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 4))
def test_chain_mask_needs_the_bonus_token_and_all_predicted_tokens(answer: list[bool], step: int) -> None:
    def inside(p: int) -> bool:
        wanted = range(p + 1, p + 3 + step)
        return wanted[-1] < len(answer) and all(answer[i] for i in wanted)

    assert chain_mask(torch.tensor([answer]), step).tolist() == [[inside(p) for p in range(len(answer))]]


def test_targets_are_renormalised_on_the_draft_vocabulary() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0, 5.0], [0.0, 3.0, 2.0, 1.0]]])
    probabilities, known = draft_targets(logits, torch.tensor([1, 2]))
    assert torch.allclose(probabilities, logits[..., 1:3].softmax(-1))
    assert known.tolist() == [[False, True]]


def one_batch(head: Eagle3Head) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Sequences that follow the head's own drafts, answers from the bonus token on; logits that want exactly these."""
    token_ids, aux_hidden_states, _ = chains(head)
    columns = torch.arange(LENGTH)
    anchors = torch.tensor(ANCHORS)[:, None]
    answer = (columns >= anchors + 1) & (columns <= anchors + 1 + STEPS) & (columns < LENGTH)
    logits = torch.full((*token_ids.shape, head.spec.vocab_size), -9.0)
    logits.scatter_(-1, shift_left(token_ids, 1)[..., None], 9.0)
    return Batch(token_ids, torch.ones_like(answer), answer, answer.double()), aux_hidden_states, logits


def test_acceptance_counts_chains_that_drafting_would_get_right() -> None:
    head = make_head()
    batch, aux_hidden_states, logits = one_batch(head)
    outcome = evaluate_batch(head, batch, aux_hidden_states, logits, STEPS, decay=0.8)
    fitting = [min(STEPS, LENGTH - a - 2) for a in ANCHORS]
    assert outcome.possible.tolist() == [sum(max(n - step, 0) for n in fitting) for step in range(STEPS)]
    assert outcome.accepted[-1] == outcome.possible[-1] > 0  # only the anchors' own chains reach the last step
    spoiled = Batch(batch.token_ids.clone(), batch.real, batch.answer, batch.draws)
    spoiled.token_ids[:, 2:] = (spoiled.token_ids[:, 2:] + 1) % head.spec.vocab_size
    assert evaluate_batch(head, spoiled, aux_hidden_states, logits, STEPS, decay=0.8).accepted[-1] == 0


def test_loss_is_the_decayed_soft_cross_entropy() -> None:
    head = make_head()
    batch, aux_hidden_states, logits = one_batch(head)
    expected = 0.0
    for step, x in enumerate(unroll(head, batch.token_ids, aux_hidden_states, STEPS)):
        scores = head.logits(x).view(*batch.token_ids.shape, -1).log_softmax(-1)
        rows = []
        for b in range(len(ANCHORS)):
            for p in range(LENGTH):
                q = p + 1 + step  # the row of the target that predicts the same token
                if chain_mask(batch.answer, step)[b, p] and logits[b, q].argmax() in head.target_ids:
                    rows.append(-(logits[b, q][head.target_ids].softmax(-1) * scores[b, p]).sum())
        expected += float(torch.stack(rows).mean()) * 0.5**step
    assert evaluate_batch(head, batch, aux_hidden_states, logits, STEPS, decay=0.5).loss.item() == pytest.approx(
        expected, rel=1e-4
    )


def test_the_head_learns_from_every_step() -> None:
    head = make_head().requires_grad_(True)
    batch, aux_hidden_states, logits = one_batch(head)
    one, two = (evaluate_batch(head, batch, aux_hidden_states, logits, steps, 1.0).loss for steps in (1, 2))
    gradient = torch.autograd.grad(two - one, head.fc.weight)[0]
    assert gradient.abs().sum() > 0
