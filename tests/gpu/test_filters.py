"""Filters, drafts and acceptance of sampled rows, compiled, against their torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafters.vocab import scatter
from specdec.acceptance.accept import SampledInputs, accept_sampled
from specdec.acceptance.packed import PackedResult
from specdec.ops.draws import DraftPlaces, Filtered, Proposal, accept_drafts, draw_drafts, filter_rows, inverse_map
from specdec.ops.greedy_rows import greedy_ids
from specdec.requests.sampling import SamplingTensors
from specdec.requests.target_probs import draw, target_probs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROWS = [
    (0.8, 0, 0.95, 0.0),
    (0.0, 0, 1.0, 0.0),
    (1.0, 50, 0.9, 0.0),
    (1.0, 0, 1.0, 0.0),
    (2.0, 0, 0.9, 0.02),
    (5.0, 7, 0.8, 0.3),
]


def parameters() -> SamplingTensors:
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=CUDA) for column in zip(*ROWS, strict=True))
    return SamplingTensors(temperature.float(), top_k.int(), top_p.float(), min_p.float(), filters=True)


def filtered(logits: torch.Tensor, sampling: SamplingTensors) -> Filtered:
    out = Filtered(torch.zeros(len(logits), 4, device=CUDA))
    filter_rows(logits, greedy_ids(logits), sampling, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1536, 32_000, 128_256])
@pytest.mark.parametrize("scale", [0.5, 6.0, 0.0])
def test_filters(dtype: torch.dtype, vocab: int, scale: float) -> None:
    """Flat and peaked logits, and all equal ones; the reference's boundary may lie within rounding of top_p."""
    torch.manual_seed(0)
    logits, sampling = (torch.randn(len(ROWS), vocab, device=CUDA) * scale).to(dtype), parameters()
    got = filtered(logits, sampling).probs(logits, sampling.temperature, sampling.min_p)
    top_p = sampling.top_p
    near = [torch.where(top_p < 1, top_p * (1 + by), top_p) for by in (0, 1e-5, -1e-5)]
    supports = torch.stack([(got - target_probs(logits, replace(sampling, top_p=p))).abs().sum(1) for p in near])
    assert (supports.amin(0)[sampling.temperature > 0] < 1e-4).all()


def test_bits_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits, sampling = torch.randn(len(ROWS), 128_256, device=CUDA).bfloat16() * 2, parameters()
    together = filtered(logits, sampling).stats
    for row in range(len(ROWS)):
        alone = filtered(logits[row : row + 1], sampling.rows(torch.tensor([row], device=CUDA))).stats
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("draft_vocab", [32_000, 129_280])
def test_a_captured_round_follows_its_inputs(draft_vocab: int) -> None:
    """Drafts and acceptance replayed from one graph give the reference's tokens, but for few uniforms at boundaries."""
    torch.manual_seed(0)
    rows, n, vocab = len(ROWS), 3, max(128_256, draft_vocab)
    sampling, known = parameters(), torch.randperm(vocab, device=CUDA)[:draft_vocab].sort().values
    logits = torch.randn(rows * (n + 1), vocab, device=CUDA).bfloat16() * 3
    index = torch.arange(rows * (n + 1), device=CUDA).view(rows, n + 1)
    head_logits = torch.zeros(rows, n, draft_vocab, device=CUDA, dtype=torch.bfloat16)
    uniform, accept, after = (torch.zeros(rows, width, device=CUDA) for width in (n, n, n + 1))
    num_drafts = torch.full((rows,), n, device=CUDA)
    kept, counts = torch.zeros_like(head_logits), torch.full((rows,), -1, device=CUDA)
    ids, packed = torch.zeros(rows, n, dtype=torch.long, device=CUDA), PackedResult.zeros(rows, n, CUDA).packed
    of_q, of_p = Filtered.empty(rows, n, device=CUDA), Filtered.empty(rows * (n + 1), device=CUDA)
    proposal = Proposal(kept, of_q, inverse_map(known, vocab), torch.arange(rows, device=CUDA))

    def round_() -> None:
        for k in range(n):
            ids[:, k] = greedy_ids(head_logits[:, k])
            packed[:, n + 2 + k] = known[ids[:, k]]
            places = DraftPlaces(kept[:, k], packed[:, n + 2 + k], known, counts)
            own = (head_logits[:, k], ids[:, k], sampling, uniform, k, of_q.step(k))
            draw_drafts(*own, num_accepted=torch.zeros_like(counts), places=places)
        filter_rows(logits, greedy_ids(logits), sampling, of_p)
        accept_drafts(logits, index, of_p, sampling, num_drafts, accept, after, packed, proposal)

    round_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_()
    sampled = sampling.temperature > 0
    owner = torch.arange(rows, device=CUDA).repeat_interleave(n + 1)
    wrong = total = 0
    for _ in range(10):
        logits.copy_(torch.randn_like(logits) * 3)
        head_logits.copy_(logits.view(rows, n + 1, -1)[:, :n][..., known] + torch.randn_like(head_logits) * 0.3)
        for table in (uniform, accept, after):
            table.uniform_()
        graph.replay()
        q = torch.stack([target_probs(head_logits[:, k], sampling) for k in range(n)], 1)
        right = torch.stack([draw(q[:, k], uniform[:, k]) for k in range(n)], 1)
        p = target_probs(logits, sampling.rows(owner)).view(rows, n + 1, -1)
        drafts = packed[:, n + 2 :]
        verdict = accept_sampled(drafts, num_drafts, SampledInputs(p, scatter(q, known, vocab), accept, after))
        expected = PackedResult.pack(verdict.num_accepted, verdict.next_token, drafts).packed
        wrong += int((right != ids)[sampled].sum()) + int((expected != packed)[sampled].any(1).sum())
        total += int(sampled.sum()) * (n + 1)
        assert torch.equal(packed[:, n + 2 :], known[ids]) and torch.equal(kept[sampled], head_logits[sampled])
        assert torch.equal(counts == 0, sampled)
    assert wrong <= total // 50
