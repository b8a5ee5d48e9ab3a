"""ChainLoop over a paged cache: rounds of it give the drafts of a head that recomputes everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import eagle3_head, random_prompts, table_head, tiny_llama

from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.runner import GroupRunner
from drafters.base import Head
from drafters.loops.base import Draft, DraftingRows
from drafters.loops.chain import ChainLoop, DraftInputs
from drafters.loops.prefill import DevicePass
from drafters.loops.steps import step_arrays
from drafters.oracle import oracle_drafts

CPU = torch.device("cpu")
PAGE_SIZE, WIDTH = 4, 8
TABLE = np.array([[9, 3, 14, 1, 20, 6, 11, 2], [5, 12, 7, 19, 4, 17, 8, 10]], np.int32)


def staged(batch: object) -> CommonAttentionMetadata:
    """Staged alone, in an arena of its own."""
    arena, bucket = single_batch_arena(4, 64, WIDTH, CPU)
    return stage(batch, arena, bucket)  # type: ignore[arg-type]


def greedy(step: int, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
    return logits.argmax(-1), None


class Rows:
    """Two sequences with their true states, drafted for in rounds."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.ids = random_prompts([31, 31], seed=9)
        model = tiny_llama(context=0.35)
        with torch.no_grad():
            states = model(torch.tensor(self.ids), output_hidden_states=True).hidden_states
        self.aux_hidden_states = torch.cat([states[layer] for layer in head.aux_layers], -1)  # [2, L, A·Ht]
        group = CacheGroup("head", tuple(head.attention_specs), 21, PAGE_SIZE)
        self.runner = GroupRunner(TorchBackend(CPU), group, torch.float32, CPU)

    def round(self, start: list[int], stop: list[int], num_drafts: list[int]) -> Draft:
        """The draft prefill reads positions start[i] … stop[i]-1 (the bonus token is at stop[i]); then the steps."""
        lens = np.array(stop) - np.array(start)
        first = rows_batch(np.concatenate([[0], np.cumsum(lens)]), np.array(start), TABLE, PAGE_SIZE)
        steps = step_arrays(DraftingRows(np.array(stop), np.array(num_drafts), TABLE, PAGE_SIZE))
        span = range(2)
        tokens = [self.ids[i][p + 1] for i in span for p in range(start[i], stop[i])]
        aux_hidden_states = torch.cat([self.aux_hidden_states[i, start[i] : stop[i]] for i in span])
        shuffled = torch.randperm(len(aux_hidden_states), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            prefill = DevicePass(
                token_ids=torch.tensor(tokens),
                sources=shuffled.argsort(),
                last_row=torch.from_numpy(np.cumsum(lens) - 1),
                metadata=staged(first),
            )
            inputs = DraftInputs(None, 2, (prefill,), tuple(staged(batch) for batch in steps.batches))
            return ChainLoop(self.head).run(inputs, self.runner, aux_hidden_states[shuffled], greedy)

    def oracle(self, stop: list[int], num_drafts: list[int]) -> list[list[int]]:
        with torch.no_grad():
            return [
                oracle_drafts(
                    self.head, torch.tensor(self.ids[i][: stop[i] + 1]), self.aux_hidden_states[i, : stop[i]], n
                )
                for i, n in enumerate(num_drafts)
            ]


ROUNDS = [([0, 0], [7, 3], [3, 5]), ([7, 3], [8, 8], [4, 1]), ([8, 8], [12, 9], [2, 5]), ([12, 9], [26, 24], [5, 5])]


def head_of(kind: str) -> Head:
    model = tiny_llama(context=0.35)
    return eagle3_head(model) if kind == "eagle3" else table_head(model, known=range(0, 64, 2))


@pytest.mark.parametrize("kind", ["eagle3", "table"])
def test_rounds_over_the_cache_equal_the_oracle(kind: str) -> None:
    """What earlier steps wrote is scratch; the draft prefill writes the true states over it."""
    rows = Rows(head_of(kind))
    for start, stop, num in ROUNDS:
        draft = rows.round(start, stop, num)
        assert draft.token_ids.shape == (2, max(num)) and draft.probs is None
        ours = [row[:n] for row, n in zip(draft.token_ids.tolist(), num, strict=True)]
        assert ours == rows.oracle(stop, num)


def test_keeping_the_scratch_states_would_show() -> None:
    """Planted: skip the true states of the second round, as if what the steps wrote were good enough."""
    rows = Rows(head_of("table"))
    rows.round(*ROUNDS[0])
    third = rows.round([8, 8], ROUNDS[2][1], ROUNDS[2][2])
    ours = [row[:n] for row, n in zip(third.token_ids.tolist(), ROUNDS[2][2], strict=True)]
    assert ours != rows.oracle(ROUNDS[2][1], ROUNDS[2][2])


def test_a_prompt_chunk_alone_is_read_and_drafts_nothing() -> None:
    rows = Rows(head_of("table"))
    first = rows_batch(np.array([0, 5]), np.array([0]), TABLE[:1], PAGE_SIZE)
    last = torch.tensor([4])
    pass_ = DevicePass(torch.tensor(rows.ids[0][1:6]), torch.arange(5), last, metadata=staged(first))
    with torch.no_grad():
        aux = rows.aux_hidden_states[0, :5]
        draft = ChainLoop(rows.head).run(DraftInputs(None, 0, (pass_,), ()), rows.runner, aux, greedy)
    assert draft.token_ids.shape == (0, 0) and draft.probs is None
    written = rows.runner.layers[0].keys[TABLE[0, :2].tolist()].flatten(0, 1).abs().sum((1, 2)) > 0
    assert written.tolist() == [True] * 5 + [False] * 3


def test_probabilities_are_stacked_by_step() -> None:
    rows = Rows(head_of("table"))

    def choose(step: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmin(-1), torch.full_like(logits, float(step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "greedy", choose)
        draft = rows.round([0, 0], [4, 4], [3, 3])
    assert draft.probs is not None and draft.probs.shape == (2, 3, 32)
    assert draft.probs[0, :, 0].tolist() == [0.0, 1.0, 2.0]
