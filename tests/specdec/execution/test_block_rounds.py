"""Rounds with block-parallel heads from graphs: drafts and tokens of eager rounds, greedy and sampled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fakes import free_everywhere, hf_greedy, tiny_llama, wrap, wrong_rounds

from drafters.loops.block.fixed import FixedBlock
from specdec.requests.sampling import SamplingParams
from tests.drafters.loops.block.test_rounds import HEADS, PROMPTS, made
from tests.specdec.execution.test_graphs import (
    FixedPlaceBackend,
    Replayed,
    graphs_on_cpu,  # noqa: F401
    recorded_on_cpu,  # noqa: F401
    with_graphs,
)

GREEDY = SamplingParams(max_new_tokens=24, return_drafts=True)
QUICK = ("dflash", "dspark", "dflash2")
OTHERS = [pytest.param(name, marks=pytest.mark.thorough) for name in HEADS if name not in QUICK]
SAMPLED = [pytest.param(name, marks=pytest.mark.thorough) for name in ("dflash", "rnn", "dflash2")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_drafts_and_tokens_are_those_of_eager_rounds(name: str, graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    head = made(name)
    eager = wrap(tiny_llama(), copy.deepcopy(head), max_num_seqs=5, max_num_batched_tokens=48)
    drafts = [c.drafts for c in eager.generate(PROMPTS, GREEDY)]
    graphed = with_graphs(head, max_num_seqs=5, max_num_batched_tokens=48)
    completions = graphed.generate(PROMPTS, GREEDY)
    assert graphed.graphs == "on" and sum(g.replays for g in graphs_on_cpu) > 20
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    assert [wrong_rounds(head, c) for c in completions] == [[] for _ in PROMPTS]
    assert [c.drafts for c in completions] == drafts
    assert free_everywhere(graphed)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_fewer_drafts_than_the_block_has(num_drafts: int, graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    sizes: dict[str, Any] = {"num_speculative_tokens": num_drafts, "max_num_seqs": 3, "max_model_len": 96}
    eager = wrap(tiny_llama(), made("dspark"), **sizes).generate(PROMPTS, GREEDY)
    graphed = with_graphs(made("dspark"), **sizes)
    completions = graphed.generate(PROMPTS, GREEDY)
    assert [(c.token_ids, c.drafts) for c in completions] == [(c.token_ids, c.drafts) for c in eager]
    assert sum(g.replays for g in graphs_on_cpu) > 20 and free_everywhere(graphed)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["rejection", pytest.param("keyed", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", ["dspark", *SAMPLED])
@pytest.mark.parametrize("planted", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_sampled_rows_draft_beside_greedy_ones_as_eagerly(
    name: str,
    sampling: str,
    planted: bool,
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: the chain goes on from the greedy choice of a row that drew another draft."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}]
    settings += [{"temperature": 1.2, "top_k": 9, "min_p": 0.02}, {}, {"temperature": 2.0}]
    params = [SamplingParams(max_new_tokens=16, seed=i, return_drafts=True, **own) for i, own in enumerate(settings)]
    sizes: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 48, "sampling": sampling}
    head = made(name)
    eager = wrap(tiny_llama(), copy.deepcopy(head), **sizes).generate(PROMPTS, params)
    if planted:
        plain = FixedBlock.step

        def step(self: Any, index: int, rows: int, planned: Any, before: Any, draw: Any) -> torch.Tensor:
            drawn = list[tuple[int, Any]]()
            x = plain(self, index, rows, planned, before, lambda slot, chosen: drawn.append((slot, chosen)))
            for slot, chosen in drawn:
                draw(slot, chosen)
            return x

        monkeypatch.setattr(FixedBlock, "step", step)
    graphed = with_graphs(head, **sizes).generate(PROMPTS, params)
    same = [(a.token_ids, a.drafts) == (b.token_ids, b.drafts) for a, b in zip(eager, graphed, strict=True)]
    assert all(same) == (not planted or name == "dflash") and same[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_preempted_row_joins_again_at_its_bonus_token(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    sizes: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 36}
    roomy = wrap(tiny_llama(), made("dspark"), **sizes)
    alone = [roomy.generate([p], GREEDY)[0] for p in PROMPTS]
    graphed = with_graphs(made("dspark"), **sizes, kv_cache_tokens=92)
    together = graphed.generate(PROMPTS, GREEDY)
    assert sum(c.stats.preemptions > 0 for c in together) >= 2
    assert [(c.token_ids, c.drafts) for c in together] == [(c.token_ids, c.drafts) for c in alone]
    assert free_everywhere(graphed)


@pytest.mark.slow
def test_what_only_writes_is_not_planned(graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A verification has a token more than the block, which a kernel of the block's width may not serve."""
    made_for, plain = set[tuple[str, int]](), FixedPlaceBackend.fixed_builder

    def builder(self: Any, group: Any, key: Any, dtype: Any, rows: int, query_len: int, *rest: Any) -> Any:
        made_for.add((group.name, query_len))
        return plain(self, group, key, dtype, rows, query_len, *rest)

    monkeypatch.setattr(FixedPlaceBackend, "fixed_builder", builder)
    head = made("dspark")
    with with_graphs(head, max_num_seqs=2, max_num_batched_tokens=48) as graphed:
        assert graphed.graphs == "on"
    assert made_for == {("target", head.block_size + 1), ("head", head.block_size)}
