"""A head and a draft loop that specdec has never heard of: made here, run through the public SpeculativeModel.

The toy head makes one pass over the accepted rows and reads all drafts off its last output: no step feeds it again.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np
import pytest
import torch
from fakes import backend_of_ours, bigram_logits, free_everywhere, hf_greedy, random_prompts, tiny_llama, wrap

from attention.backends.invariant import InvariantBackend
from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch, slots_of
from attention.batch.metadata import BatchSection, CommonAttentionMetadata
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from attention.staging import A, Section, Staged, array
from drafters.base import Head
from drafters.loops.base import Attend, Choose, Draft, DraftInput, DraftLoop, GraphLoop, LoopSize
from specdec.errors import HeadLoadError, InvalidInputError
from specdec.execution.graphs import GraphExecutor
from specdec.loading.cuda_graphs import choose_graphs
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import FixedPlaceBackend, graphs_on_cpu, recorded_on_cpu  # noqa: F401 (fixtures)

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
DIM, CONTEXT = 8, 0.03


@dataclass(frozen=True)
class ToyRows(Generic[A]):
    """Rows of the verification that the head reads, and the tokens at p+1."""

    token_ids: A = array(np.int64, "tokens")
    token_indices: A = array(np.int64, "tokens")
    last_row: A = array(np.int64, "rows")


@dataclass(frozen=True)
class ToyArrays(ToyRows[np.ndarray]):
    """The same on the host, and its attention."""

    batch: HostBatch = field(kw_only=True)
    num_drafts: int = field(kw_only=True)

    @property
    def size(self) -> LoopSize:
        return LoopSize(self.batch.num_reqs, self.batch.num_tokens, self.batch.block_table.shape[1], self.num_drafts)


@dataclass(frozen=True)
class ToyInputs(ToyRows[torch.Tensor]):
    """The same on the device."""

    metadata: CommonAttentionMetadata = field(kw_only=True)
    num_drafts: int = field(kw_only=True)


class ToySection:
    """Where they are in the arena."""

    batch, rows = BatchSection("toy"), Section(ToyRows, "toy")
    fields = (*batch.fields, *rows.fields)

    def sizes(self, size: LoopSize) -> dict[str, int]:
        return self.batch.sizes(size.rows, size.tokens, size.pages)

    def values(self, arrays: ToyArrays) -> dict[str, np.ndarray]:
        return self.batch.values(arrays.batch) | self.rows.values(arrays)

    def of(self, arrays: ToyArrays, staged: Staged) -> ToyInputs:
        metadata = self.batch.metadata(arrays.batch, staged)
        return self.rows.of(staged.views, ToyInputs, metadata=metadata, num_drafts=arrays.num_drafts)


class ToyLoop:
    """One pass, all drafts; a `DraftLoop` without a static form."""

    name = "toy heads"
    num_modules = 1
    section = ToySection()

    def __init__(self, head: ToyHead) -> None:
        self._head = head

    def arrays(self, draft: DraftInput) -> ToyArrays:
        """Row by row, as slowly as it is plain."""
        indices, owners, positions, last = [], [], [], []
        for i, row in enumerate(draft.order):
            start, stop = draft.query_start_loc[row], draft.query_start_loc[row + 1]
            accepted = stop - start - draft.num_drafts[row] + draft.num_accepted[row]
            indices += range(start, start + accepted)
            owners += [i] * accepted
            positions += range(draft.committed_lens[i] - accepted, draft.committed_lens[i])
            last.append(len(indices) - 1)
        owner, position = np.array(owners), np.array(positions)
        lens = np.bincount(owner, minlength=len(draft.order))
        batch = HostBatch(
            query_start_loc=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
            seq_lens=draft.committed_lens.astype(np.int32),
            num_computed_tokens=(draft.committed_lens - lens).astype(np.int32),
            block_table=draft.block_table,
            slot_mapping=slots_of(draft.block_table, owner, position, draft.page_size),
            positions=position,
            page_size=draft.page_size,
        )
        token_ids = draft.tokens[draft.request_rows[owner], position + 1].astype(np.int64)
        drafting = len(draft.num_drafts_next)
        return ToyArrays(
            token_ids=token_ids,
            token_indices=np.array(indices),
            last_row=np.array(last[:drafting], np.int64),
            batch=batch,
            num_drafts=int(draft.num_drafts_next.max(initial=0)),
        )

    def run(self, inputs: ToyInputs, runner: GroupRunner, aux: torch.Tensor, choose: Choose) -> Draft:
        head = self._head
        attend = partial(runner.attend, runner.plan(inputs.metadata))
        hidden = head.fuse(aux.index_select(0, inputs.token_indices))
        x = head.forward(inputs.token_ids, hidden, inputs.metadata.positions, attend).index_select(0, inputs.last_row)
        ids: list[torch.Tensor] = []
        probs: list[torch.Tensor | None] = []
        for step in range(inputs.num_drafts if len(x) else 0):
            chosen, q = choose(step, head.logits(x) if not step else head.further_logits(x, ids[-1]))
            ids.append(chosen)
            probs.append(q)
        return Draft.of(ids, probs) if ids else Draft(inputs.token_ids.new_empty(0, 0), None)


class ToyHead(torch.nn.Module):
    """Knows what the target says after each token alone, a little disturbed by one layer of attention."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.attention_specs = (AttentionSpec(2, 1, DIM, DIM, scale=0.2),)
        self.aux_layers = (2,)
        self.hidden_size, self.draft_vocab_size = target.config.hidden_size, target.config.vocab_size
        self.table = bigram_logits(target)
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(self.draft_vocab_size, self.hidden_size, generator=generator)
        self.qkv = torch.randn(self.hidden_size, 4 * DIM, generator=generator) / 4
        self.mix = torch.randn(2 * DIM, self.draft_vocab_size, generator=generator) * 0.3

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        return aux_hidden_states

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """x [T, V + 2·DIM]: what the target says after the token alone, and what was attended to."""
        rotated = torch.cos(positions[:, None] * 0.3).to(hidden.dtype)
        qkv = ((hidden + self.embedding[token_ids] * rotated) @ self.qkv).unflatten(-1, (4, DIM))
        query, key, value = qkv.split((2, 1, 1), dim=1)
        return torch.cat([self.table[token_ids], attend(0, query, key, value).flatten(1)], -1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        known, attended = x.split((self.draft_vocab_size, 2 * DIM), dim=-1)
        return known + attended @ self.mix

    def further_logits(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Of the draft after `before` [R], from the same output."""
        return self.table[before] + x[:, self.draft_vocab_size :] @ self.mix

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the toy loop feeds nothing back")

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids

    def draft_loop(self, limits: LoopSize) -> ToyLoop:
        return ToyLoop(self)


def oracle(head: ToyHead, ids: torch.Tensor, states: torch.Tensor, num_drafts: int) -> list[int]:
    """Drafts after a prefix whose bonus token is the last of ids [L+1], without a cache; states [L, H]."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * head.attention_specs[0].scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,kd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), value[:, 0])

    x = head.forward(ids[1:], head.fuse(states), torch.arange(len(states)), attend)[-1:]
    drafts = [head.logits(x).argmax(-1)]
    for _ in range(num_drafts - 1):
        drafts.append(head.further_logits(x, drafts[-1]).argmax(-1))
    return torch.cat(drafts).tolist()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"kv_cache_tokens": 88, "max_num_seqs": 6, "max_num_batched_tokens": 36, "page_size": 3},
    ],
)
@torch.no_grad()
def test_tokens_are_the_targets_own_and_drafts_those_of_its_true_states(options: dict[str, int]) -> None:
    head = ToyHead(tiny_llama())
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=4, **options)
    completions = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=24, return_drafts=True))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    compared = 0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids, bonus = torch.tensor(prompt + completion.token_ids), len(prompt)
        states = tiny_llama()(ids[None], output_hidden_states=True).hidden_states[2][0]
        for stats, drafts in zip(completion.stats.rounds, completion.drafts or (), strict=True):
            if drafts:
                assert list(drafts) == oracle(head, ids[: bonus + 1], states[:bonus], len(drafts))
                compared += 1
            bonus += stats.emitted
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert compared > 20 and 0 in accepted and max(accepted) >= 3
    assert wrapped.engine_stats.host_to_device == wrapped.engine_stats.rounds, "one copy with the loop's own arrays"
    assert free_everywhere(wrapped)


@pytest.mark.slow
def test_sampled_rows_draft_by_the_loop_too() -> None:
    wrapped = wrap(tiny_llama(), ToyHead(tiny_llama()), num_speculative_tokens=3)
    params = [SamplingParams(max_new_tokens=12, temperature=0.9 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    completions = wrapped.generate(PROMPTS, params)
    assert [c.token_ids for c in completions[::2]] == [hf_greedy(p, 12) for p in PROMPTS[::2]]
    assert wrapped.generate([PROMPTS[3]], params[3])[0].token_ids == completions[3].token_ids


def test_its_protocols() -> None:
    head = ToyHead(tiny_llama())
    loop = head.draft_loop(LoopSize())
    assert isinstance(head, Head) and isinstance(loop, DraftLoop) and not isinstance(loop, GraphLoop)


def test_graphs_are_refused_in_the_loops_own_words() -> None:
    loop = ToyHead(tiny_llama()).draft_loop(LoopSize())
    choose_graphs(TorchBackend(torch.device("cpu")), loop, False)
    with pytest.raises(InvalidInputError, match="toy heads run without CUDA graphs"):
        choose_graphs(InvariantBackend(), loop, True)


def test_a_graph_executor_of_its_own_refuses_it_too(graphs_on_cpu: list[Any]) -> None:  # noqa: F811
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        wrapped = wrap(tiny_llama(), ToyHead(tiny_llama()), num_speculative_tokens=3)
    with pytest.raises(InvalidInputError, match="toy heads run without CUDA graphs; use cuda_graphs=False"):
        GraphExecutor(wrapped.target, wrapped.engine.executor.drafter, wrapped.config)


def test_what_is_no_head_is_named_before_anything_is_built() -> None:
    class Old(torch.nn.Module):
        aux_layers, hidden_size, draft_vocab_size, attention_specs = (1,), 32, 64, ()
        fuse = logits = feedback = to_target_ids = torch.nn.Module.forward

    with pytest.raises(HeadLoadError, match=r"Old is no draft head: it has no draft_loop; see drafters\.base\.Head"):
        wrap(tiny_llama(), Old(), num_speculative_tokens=3)


FAMILIES = {"Eagle3Head", "MtpHead", "MtpStack"}


def head_families(source: str) -> list[str]:
    """Places that tell head families apart: isinstance, issubclass, `type(x) is`, match on a class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: set[str] = set()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            names = {part.id for arg in node.args[1:] for part in ast.walk(arg) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.Compare):
            names = {part.id for other in node.comparators for part in ast.walk(other) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.MatchClass):
            names = {ast.unparse(node.cls)}
        found += [f"line {node.lineno}: {name}" for name in sorted(names & FAMILIES)]  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_specdec_tells_no_head_families_apart() -> None:
    files = sorted((ROOT / "specdec").rglob("*.py"))
    assert len(files) > 50
    assert {str(path): places for path in files if (places := head_families(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "if isinstance(head, (MtpHead, MtpStack)): pass",
        "x = type(head) is Eagle3Head",
        "match head:\n    case MtpStack():\n        pass",
    ],
)
def test_a_planted_distinction_is_seen(line: str) -> None:
    assert head_families(line)
