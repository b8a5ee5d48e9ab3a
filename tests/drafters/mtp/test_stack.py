"""Several modules over a paged cache: rounds of them give the drafts of modules that recompute everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import random_prompts

from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.runner import GroupRunner
from drafters.errors import HeadLoadError
from drafters.loops.base import Draft, DraftingRows
from drafters.loops.chain import DraftInputs, run_prefill, run_steps
from drafters.loops.prefill import DevicePass, module_batch, module_rows
from drafters.loops.steps import step_arrays
from drafters.mtp.checkpoint import load_mtp
from drafters.mtp.head import MtpStack
from drafters.mtp.spec import mtp_target
from drafters.oracle import oracle_drafts
from tests.oracles import oracle_module_drafts

CPU = torch.device("cpu")
PAGE_SIZE, WIDTH = 4, 10
TABLE = np.array([[9, 3, 14, 1, 20, 6, 11, 2, 23, 24], [5, 12, 7, 19, 4, 17, 8, 10, 21, 22]], np.int32)
ROUNDS = [([0, 0], [7, 3], [3, 5]), ([7, 3], [8, 8], [4, 1]), ([8, 8], [12, 9], [2, 6]), ([12, 9], [26, 24], [6, 6])]
SHORT = [([0, 0], [1, 2], [5, 5]), ([1, 2], [2, 3], [5, 5]), ([2, 3], [3, 9], [5, 4]), ([3, 9], [9, 12], [6, 3])]


def staged(batch: Any) -> CommonAttentionMetadata:
    arena, bucket = single_batch_arena(4, 64, WIDTH, CPU)
    return stage(batch, arena, bucket)


def greedy(step: int, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
    return logits.argmax(-1), None


class Rows:
    """Two sequences with their true states, drafted for in rounds."""

    def __init__(self, case: Any, stack: MtpStack) -> None:
        self.stack = stack
        self.ids = random_prompts([34, 34], seed=9)
        with torch.no_grad():
            self.states = case.model.get_decoder()(torch.tensor(self.ids), use_cache=False).last_hidden_state
        group = CacheGroup("head", stack.attention_specs, 25, PAGE_SIZE)
        self.runner = GroupRunner(TorchBackend(CPU), group, torch.float32, CPU)
        self.carried = torch.full((len(stack.mtp_modules), 2, 32), 99.0)  # unread: requests start

    @torch.no_grad()
    def round(self, start: list[int], stop: list[int], num_drafts: list[int]) -> Draft:
        """The draft prefill reads positions start[i] … stop[i]-1 (the bonus token is at stop[i]); then the steps."""
        first, lens = np.array(start), np.array(stop) - np.array(start)
        tokens = torch.tensor([self.ids[i][p + 1] for i in range(2) for p in range(start[i], stop[i])])
        aux_hidden_states = torch.cat([self.states[i, start[i] : stop[i]] for i in range(2)])
        shuffled = torch.randperm(len(aux_hidden_states), generator=torch.Generator().manual_seed(0))
        starts = np.concatenate([[0], np.cumsum(lens)])
        last_row = torch.from_numpy(starts[1:] - 1)
        batch = rows_batch(starts, first, TABLE, PAGE_SIZE)
        passes = [DevicePass(tokens, shuffled.argsort(), last_row, metadata=staged(batch))]
        for rows in module_rows(first, lens, len(self.stack.mtp_modules)):
            own, sources, last = (torch.from_numpy(x) for x in (rows.tokens, rows.sources, rows.last_row))
            passes.append(DevicePass(tokens[own], sources, last, metadata=staged(module_batch(rows, TABLE, PAGE_SIZE))))
        modules = self.stack.mtp_modules
        last = run_prefill(modules, self.runner, aux_hidden_states[shuffled], passes, self.carried)
        self.carried = torch.stack(last)
        drafting = DraftingRows(np.array(stop), np.array(num_drafts), TABLE, PAGE_SIZE)
        steps = tuple(staged(batch) for batch in step_arrays(drafting, len(modules)).batches)
        return run_steps(modules, self.runner, last, DraftInputs(None, 2, tuple(passes), steps), greedy)

    @torch.no_grad()
    def oracle(self, stop: list[int], num_drafts: list[int]) -> list[list[int]]:
        prefixes = [(torch.tensor(self.ids[i][: stop[i] + 1]), self.states[i, : stop[i]]) for i in range(2)]
        return [oracle_module_drafts(self.stack, *p, n) for p, n in zip(prefixes, num_drafts, strict=True)]

    def wrong(self, rounds: list[tuple[list[int], list[int], list[int]]]) -> list[int]:
        """Rounds whose drafts differ from the oracle's."""
        found = []
        for index, (start, stop, num) in enumerate(rounds):
            draft, right = self.round(start, stop, num), self.oracle(stop, num)
            assert [len(r) for r in right] == [
                n if s >= len(self.stack.mtp_modules) else min(n, s + 1) for s, n in zip(stop, num, strict=True)
            ]
            if [row[: len(r)] for row, r in zip(draft.token_ids.tolist(), right, strict=True)] != right:
                found.append(index)
        return found


@pytest.fixture
def make(tiny_case: Callable[..., Any], tmp_path: Path) -> Callable[[str, int], Rows]:
    def built(name: str, modules: int) -> Rows:
        case = tiny_case(name, modules=modules, context=0.4)
        return Rows(case, MtpStack(load_mtp(case.write(tmp_path), mtp_target(case.model), torch.float32, "cpu")))

    return built


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "rounds"),
    [
        pytest.param(*own, rounds, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, own in enumerate((("deepseek_v3", 2), ("deepseek_v3", 3), ("mimo", 2), ("ernie", 4)))
        for j, rounds in enumerate((ROUNDS, SHORT))
    ],
)
@pytest.mark.cases(1)
def test_rounds_over_the_caches_equal_full_recomputation(
    name: str, modules: int, rounds: Any, make: Callable[[str, int], Rows]
) -> None:
    """More drafts than modules, page crossings, prompts shorter than the modules are many."""
    assert make(name, modules).wrong(rounds) == []


@pytest.mark.long
def test_an_uncarried_vector_shows(make: Callable[[str, int], Rows]) -> None:
    """Planted: the second round's module 1 begins with the wrong vector."""
    rows = make("deepseek_v3", 2)
    rows.round(*ROUNDS[0])
    rows.carried = rows.carried.flip(1)
    assert rows.wrong(ROUNDS[1:])


@pytest.mark.long
@pytest.mark.parametrize(
    "module", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long), 2]
)
def test_a_zeroed_page_of_any_modules_layer_shows(module: int, make: Callable[[str, int], Rows]) -> None:
    """Planted: every module has a cache of its own that the drafts depend on."""
    rows = make("deepseek_v3", 3)
    with torch.no_grad():
        for each in rows.stack.heads:
            each.blocks[0].self_attn.o_proj.weight.mul_(20)  # type: ignore[union-attr, operator]
    rows.round(*ROUNDS[0])
    rows.runner.layers[module].keys[TABLE[:, 0].tolist()] = 0
    assert rows.wrong(ROUNDS[1:])


def test_keeping_the_scratch_rows_would_show(make: Callable[[str, int], Rows]) -> None:
    """Planted: skip the true states of the second round, as if what the steps wrote were good enough."""
    rows = make("deepseek_v3", 2)
    rows.round(*ROUNDS[0])
    assert rows.wrong([([8, 8], [12, 9], [2, 6])])


def test_the_oracle_of_one_module_is_the_ordinary_one(make: Callable[[str, int], Rows]) -> None:
    """The stack's definition for M modules, with M = 1, is what `oracle_drafts` does."""
    rows = make("deepseek_v3", 2)
    head = rows.stack.first
    rows.stack.heads = torch.nn.ModuleList([head])
    with torch.no_grad():
        plain = oracle_drafts(head, torch.tensor(rows.ids[0][:12]), rows.states[0, :11], 4)
    assert rows.oracle([11, 9], [4, 4])[0] == plain


def test_one_module_is_no_stack(make: Callable[[str, int], Rows]) -> None:
    with pytest.raises(HeadLoadError, match="two or more"):
        MtpStack([make("deepseek_v3", 2).stack.first])
