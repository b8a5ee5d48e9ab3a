"""How the memory is divided among cache groups; Gemma 3's numbers, and Llama 4's."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import check_mode, table_head, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from attention.cache.kv_cache import KVFormat
from attention.cache.pages import BlockTables
from attention.spec import Reach
from specdec.config import EngineConfig, WindowedPool
from specdec.engine.scheduler import Scheduler, windowed_tables
from specdec.loading.sizes import Pool, Pools, Rows, divided, empty_pools, filled, windowed_pools
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.rounds.rows import RowTable
from specdec.wrapped.probing import probe_target

GIB = 1 << 30
LAYER = 8 * 256 * 2 * 2
"""Bytes of a token in a layer of Gemma 3 12B: 8 KV heads of 256, keys and values, bfloat16."""
WINDOW = Reach(1024)
GEMMA = (Pool(8 * LAYER), Pool(40 * LAYER, WINDOW))
"""40 layers with a window of 1,024 and 8 without."""
SCOUT = (Pool(12 * LAYER // 2), Pool(36 * LAYER // 2, Reach(8192, 8192)))
"""Llama 4 Scout: 36 layers in chunks of 8,192 and 12 that see all, with 8 KV heads of 128."""
LONG = 32768


def gemma_rows(max_num_seqs: int = 32, length: int = LONG) -> Rows:
    return Rows(5, length, max_num_seqs, 2048, 16)


def taken(division: Pools) -> int:
    return sum(pool.bytes for pool in division)


def one_pool(room: int, pools: Pools) -> int:
    """Tokens of a cache in which all layers keep all tokens."""
    return room // sum(pool.token_bytes for pool in pools)


def rows_held(division: Pools, rows: Rows) -> int:
    """Rows of max_model_len tokens that decode at once."""
    count = division[0].tokens // rows.max_model_len
    while count and rows.tokens(WINDOW, count) > division[1].tokens:
        count -= 1
    return count


@pytest.mark.parametrize("room", [20 * GIB, 40 * GIB, 80 * GIB])
@pytest.mark.parametrize("max_num_seqs", [8, 32, 256])
def test_gemma_3_holds_four_times_the_tokens_at_32k(room: int, max_num_seqs: int) -> None:
    """In whole rows as well, where the memory is for several: 6 of 32,768 tokens in 20 GiB instead of 1."""
    rows = gemma_rows(max_num_seqs)
    division = divided(room, max_num_seqs * LONG, GEMMA, rows)
    one_group = min(one_pool(room, GEMMA), max_num_seqs * LONG)
    assert taken(division) <= room
    whole = max_num_seqs * LONG
    assert division[0].tokens >= min(4 * one_group, whole), f"{division[0].tokens / one_group:.2f} times"
    assert rows_held(division, rows) >= min(4 * (one_group // LONG), max_num_seqs)


def test_the_numbers_of_20_gib() -> None:
    rows = gemma_rows()
    division = divided(20 * GIB, 32 * LONG, GEMMA, rows)
    assert one_pool(20 * GIB, GEMMA) == 54613
    assert division[0].tokens > 4.5 * 54613 and rows_held(division, rows) >= 7
    assert division[1].tokens * 40 * LAYER <= 5 * GIB, "a quarter"


def test_llama_4_holds_three_times_the_tokens_at_128k() -> None:
    """In 80 GiB ten rows of 131,072 tokens instead of three."""
    rows = gemma_rows(length=131072)
    division, one_group = divided(80 * GIB, 32 * 131072, SCOUT, rows), one_pool(80 * GIB, SCOUT)
    assert taken(division) <= 80 * GIB and one_group // 131072 == 3
    assert division[0].tokens > 3 * one_group, f"{division[0].tokens / one_group:.2f} times"
    assert division[0].tokens // 131072 == 10 and rows.tokens(Reach(8192, 8192), 10) <= division[1].tokens
    assert rows.tokens(Reach(8192, 8192), 1) == 8192 + 16 + 2048, "of a row that decodes, and a chunk of a prompt"


def most_decoding(num_pages: int, windowed: tuple[WindowedPool, ...]) -> int:
    """Rows of about 32,768 tokens that decode at once when eight such requests come to a scheduler over these pools."""
    config = EngineConfig(5, LONG, 32, 2048, 16, num_pages, windowed=windowed)
    table = RowTable(32, LONG)
    pages, head = (BlockTables(n, 32, LONG, 16) for n in (num_pages, config.num_head_pages))
    near = [windowed_tables(config, pool) for pool in windowed]
    scheduler, prompt, stream = Scheduler(config, table, pages, head, windowed_pages=near), LONG - 700, None
    for number in range(8):
        tokens = np.zeros(prompt, np.int32)
        sizes = (prompt, LONG - 10, 5, 1)
        scheduler.waiting.append(Request(number, SamplingParams(), *sizes, tokens, stream, 0, (), Times(0.0)))  # type: ignore[arg-type]
    most = 0
    for _ in range(600):  # prompts are read in pieces of 512 tokens beside rows that decode
        schedule = scheduler.schedule()
        assert schedule is not None
        rows = schedule.rows
        table.computed[rows] += schedule.num_new
        at_end = rows[table.computed[rows] == table.length[rows]]
        table.length[at_end] += 1
        most = max(most, int((table.computed[[r.row for r in scheduler.running]] >= prompt).sum()))
        for each in [r for r in scheduler.running if table.length[r.row] >= r.limit]:
            scheduler.remove(each)
    return most


@pytest.mark.slow
def test_a_scheduler_holds_as_many_rows_as_the_sizes_say() -> None:
    division = divided(20 * GIB, 32 * LONG, GEMMA, gemma_rows())
    with check_mode(False):  # the validators look at every page of pools of thousands
        assert most_decoding(one_pool(20 * GIB, GEMMA) // 16 + 1, ()) == 1
        assert most_decoding(division[0].tokens // 16 + 1, windowed_pools(division, 16)) == 7


def test_scarce_memory_is_shared_with_short_requests() -> None:
    """Rows of 131,072 tokens are few, so windows for many more rows than fit are kept, up to a quarter."""
    rows = gemma_rows(length=131072)
    division = divided(20 * GIB, 32 * 131072, GEMMA, rows)
    assert division[0].tokens // 131072 == 1 and rows.tokens(WINDOW, 12) <= division[1].tokens
    assert taken(division) <= 20 * GIB


def test_memory_for_all_that_is_wanted() -> None:
    rows = gemma_rows(4, 4096)
    assert divided(80 * GIB, 4 * 4096, GEMMA, rows) == filled(GEMMA, (16384, rows.tokens(WINDOW, 4)))
    assert divided(80 * GIB, 100, GEMMA, rows) == filled(GEMMA, (100, 100)), "never more than the first group has"


@pytest.mark.parametrize("room", [GIB // 8, GIB // 2, GIB])
def test_little_memory_never_holds_less_than_one_group(room: int) -> None:
    """A chunk's pages alone are 640 MiB here."""
    division = divided(room, 32 * LONG, GEMMA, gemma_rows())
    assert division[0].tokens >= one_pool(room, GEMMA) and taken(division) <= room


def test_one_group_takes_what_there_is() -> None:
    assert divided(1000, 10**6, (Pool(8),), gemma_rows()) == (Pool(8, tokens=125),)
    assert divided(1000, 50, (Pool(8),), gemma_rows()) == (Pool(8, tokens=50),)


def test_a_models_layers_by_what_the_probe_sees() -> None:
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=30,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_position_embeddings=200,
    )
    probed = probe_target(AutoModelForCausalLM.from_config(config).eval())
    layer = 2 * 2 * 16 * 4
    assert empty_pools(probed, None, KVFormat(), 200) == (Pool(layer), Pool(5 * layer, Reach(20)))
    assert empty_pools(probed, None, KVFormat(), 20) == (Pool(6 * layer),), "no request is longer than the window"
    assert empty_pools(probed, None, KVFormat(), 200, grouped=False) == (Pool(6 * layer),)
    head = table_head(tiny_llama())
    assert empty_pools(probed, head, KVFormat(), 200)[0].token_bytes == layer + 2 * 8 * 4
