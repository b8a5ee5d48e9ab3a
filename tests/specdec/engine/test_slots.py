"""No row ever writes a slot it does not own, and every slot is the one of its position."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fakes import backend_of_ours, examples, random_prompts, scheduler_of, table_head, tiny_llama, wrap
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.backends.reference import TorchBackend
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import LayerKV
from attention.cache.pages import BlockTables
from specdec.requests.sampling import SamplingParams


class Watch:
    """Looks at every batch that a model's backend writes, and compares it with the owners of the pages."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()
        self.padding = 0
        self.pools: dict[int, tuple[str, BlockTables]] = {}

    def wrap(self, *args: Any, **options: Any) -> Any:
        """A model that is watched from its first round on; the self-test at load has its own pages."""
        with backend_of_ours(Watching(self)):
            wrapped = wrap(*args, **options)
        scheduler = scheduler_of(wrapped)
        pools = [("target", scheduler.target_pages)]
        if scheduler.head_pages is not None:
            pools.append(("head", scheduler.head_pages))
        for runner, pool in zip(wrapped.runners, pools, strict=True):
            self.pools |= {id(layer): pool for layer in runner.layers}
        assert len(self.pools) == sum(len(runner.layers) for runner in wrapped.runners)
        return wrapped

    def check(self, kv: LayerKV, metadata: CommonAttentionMetadata, num_tokens: int) -> None:
        """Judge one batch of a layer."""
        if self.pools:
            name, pages = self.pools[id(kv)]
            self.judge(name, metadata, pages, num_tokens)

    def judge(self, name: str, metadata: CommonAttentionMetadata, pages: BlockTables, num_tokens: int) -> None:
        """Judge one batch."""
        host, size = metadata.host, pages.page_size
        owner = {
            int(page): (row, place) for row, own in enumerate(pages.table) for place, page in enumerate(own) if page
        }
        slots = metadata.slot_mapping.tolist()
        assert slots == host.slot_mapping.tolist() and metadata.positions.tolist() == host.positions.tolist()
        assert len(slots) == num_tokens
        live, rows_seen = [], []
        for i in range(host.num_reqs):
            span = range(host.query_start_loc[i], host.query_start_loc[i + 1])
            if [slots[t] for t in span] == [0] and host.seq_lens[i] == 1:
                self.padding += 1
                continue
            owners = {owner[slots[t] // size][0] for t in span}
            assert len(owners) == 1, "a row writes into pages of one row"
            rows_seen += owners
            for t in span:
                _, place = owner[slots[t] // size]
                assert place * size + slots[t] % size == host.positions[t], "the slot of its position"
                live.append(slots[t])
        assert len(set(live)) == len(live), "no slot is written twice in one batch"
        assert len(set(rows_seen)) == len(rows_seen), "two batch rows are two requests"
        assert 0 not in {slot // size for slot in live}
        self.batches[name] += 1


class Watching(TorchBackend):
    """The reference, which shows every batch to a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(torch.device("cpu"))
        self.watch = watch

    def run(self, plan: Any, key: Any, q: Any, k: Any, v: Any, kv: LayerKV, metadata: Any, *more: Any) -> Any:
        self.watch.check(kv, metadata, len(k))
        return super().run(plan, key, q, k, v, kv, metadata, *more)


@pytest.mark.slow
@settings(max_examples=examples(8), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    new=st.lists(st.integers(1, 20), min_size=6, max_size=6),
    drafts=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    page_size=st.sampled_from([1, 3, 4, 16]),
    rows=st.integers(1, 4),
    budget=st.integers(20, 40),
    spare=st.integers(0, 60),
    seed=st.integers(0, 3),
)
@pytest.mark.thorough
def test_every_written_slot_belongs_to_its_row(
    lengths: list[int], new: list[int], drafts: list[int], page_size: int, rows: int, budget: int, spare: int, seed: int
) -> None:
    prompts = random_prompts(lengths, seed)
    params = [
        SamplingParams(max_new_tokens=n, num_speculative_tokens=k, temperature=0.9 * (i % 2), seed=seed)
        for i, (n, k) in enumerate(zip(new, drafts, strict=True))
    ][: len(prompts)]
    model = tiny_llama()
    watch = Watch()
    wrapped = watch.wrap(
        model,
        table_head(model),
        num_speculative_tokens=4,
        page_size=page_size,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=64,
        kv_cache_tokens=96 + spare,
    )
    completions = wrapped.generate(prompts, params)
    assert [len(c.token_ids) for c in completions] == [
        min(p.max_new_tokens, 64 - len(x)) for p, x in zip(params, prompts, strict=True)
    ]
    assert watch.batches["target"] == 4 * wrapped.engine_stats.rounds, "four layers a round"


def test_rows_that_end_leave_padding_on_the_null_page() -> None:
    """Rows with fewer drafts than their neighbours pad the later steps."""
    model = tiny_llama()
    watch = Watch()
    wrapped = watch.wrap(model, table_head(model), num_speculative_tokens=4)
    params = [SamplingParams(max_new_tokens=20, num_speculative_tokens=k) for k in (4, 2, 1)]
    wrapped.generate(random_prompts([5, 9, 12]), params)
    assert watch.padding > 0


def test_the_watch_sees_a_page_crossing_by_plus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import drafters.loops.steps
    from specdec.errors import RoundFailedError

    def plus_one(table: Any, rows: Any, pages: Any, offsets: Any, page_size: int, out: np.ndarray) -> None:
        positions = pages * page_size + offsets
        first = positions - positions % 8
        out[:] = table[rows, first // page_size].astype(np.int64) * page_size + positions - first

    monkeypatch.setattr(drafters.loops.steps, "slots_at", plus_one)
    model = tiny_llama()
    with pytest.raises((AssertionError, KeyError, RoundFailedError)):
        wrapped = Watch().wrap(model, table_head(model), num_speculative_tokens=4)
        wrapped.generate(random_prompts([5, 9, 12]), SamplingParams(max_new_tokens=20))


def test_a_row_reads_nothing_but_what_it_wrote() -> None:
    """NaN everywhere in a fresh cache changes nothing (rows of equal length: none is padded with the null page)."""
    prompts = random_prompts([5, 5])
    params = SamplingParams(max_new_tokens=12)
    clean = wrap(tiny_llama()).generate(prompts, params)
    wrapped = wrap(tiny_llama())
    for layer in wrapped.target.runner.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    spoiled = wrapped.generate(prompts, params)
    assert [c.token_ids for c in spoiled] == [c.token_ids for c in clean]
    assert torch.isnan(wrapped.target.runner.layers[0].keys).any()
