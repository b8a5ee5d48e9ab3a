"""Windowed cache groups on a GPU: page lists near the window or the chunk in every kernel, and whole models from CUDA
graphs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from fakes import count_calls, free_everywhere
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, Llama4TextConfig, PreTrainedModel

from attention.backends.invariant import InvariantBackend
from attention.batch.host import HostBatch
from attention.batch.metadata import BatchSection, CommonAttentionMetadata
from attention.batch.transforms.windowed import windowed_batch
from attention.cache.windowed import WindowedTables
from attention.groups import GroupedRunner
from attention.runner import FixedPlanner
from attention.spec import Reach
from attention.staging import StagingArena, bucket_of
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from specdec import Completion
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.agreement import agreement, drafted
from tests.gpu.test_flashinfer import CUDA, LIMIT, Pair, attention_spec, host_batch, metadata_of, relative_error
from tests.gpu.test_graph_rounds import Tokenizer

WINDOW, VOCAB, LONGEST = 64, 512, 2048
BATCHES = {
    "decode": ([1, 1, 1, 1], [700, 31, 129, 1500]),
    "verify": ([6, 6, 4, 1, 6], [310, 0, 1023, 160, 62]),
    "mixed": ([4, 1, 200, 3, 33], [500, 80, 0, 14, 128]),
    "long": ([600, 513], [90, 333]),
}


def freed(batch: HostBatch, reach: Reach) -> tuple[HostBatch, np.ndarray]:
    """The batch with the pages before what it sees freed, as a windowed group has it, and those pages."""
    size = batch.page_size
    tables = WindowedTables(9000, batch.num_reqs, int(batch.seq_lens.max()), size, reach)
    rows = np.arange(batch.num_reqs)
    tables.resize(rows, batch.seq_lens)
    tables.table[:, : batch.block_table.shape[1]] = batch.block_table
    before = tables.table.copy()
    for row, computed in enumerate(batch.num_computed_tokens.tolist()):
        tables.table[row, : tables.first_needed(computed)] = 0
    return windowed_batch(batch, tables.table, rows, reach), before[before != tables.table]


def sent(batch: HostBatch) -> CommonAttentionMetadata:
    """On the device, as the only group of a batch: page lists of its own beside lengths of whole rows."""
    section = BatchSection("b")
    bucket = bucket_of(**section.sizes(batch.num_reqs, batch.num_tokens, batch.block_table.shape[1]))
    arena = StagingArena(section.fields, bucket, CUDA)
    return section.metadata(batch, arena.send(bucket, section.values(batch)))


@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "options",
    [{"window": WINDOW, **more} for more in ({}, {"softcap": 30.0}, {"has_sinks": True})]
    + [{"chunk_size": chunk} for chunk in (64, 128)],
    ids=["plain", "softcap", "sinks", "chunks within tiles", "chunks of tiles"],
)
@pytest.mark.parametrize("backend", ["flashinfer", "batch_invariant"])
def test_kernels_read_no_freed_page(backend: str, options: dict[str, Any], page_size: int, shape: str) -> None:
    """NaN on every freed page; the same attention as over whole rows, and by the invariant kernel the same bits."""
    spec, dtype = attention_spec(**options), torch.bfloat16
    pair = Pair(spec, dtype, page_size, backend=InvariantBackend() if backend == "batch_invariant" else None)
    pair.flashinfer.layers[0].keys[0] = pair.flashinfer.layers[0].values[0] = 0
    pair.reference.layers[0].keys[0] = pair.reference.layers[0].values[0] = 0
    batch = host_batch(*BATCHES[shape], page_size)
    query, key, value = states = pair.states(batch.num_tokens)
    whole = metadata_of(batch)
    right = pair.expected(whole, states)
    before = pair.flashinfer.attend(pair.flashinfer.plan(whole), 0, query, key, value, pair.sinks)
    assert spec.reach is not None
    windowed, gone = freed(batch, spec.reach)
    assert len(gone) and int(windowed.page_counts.sum()) < int(batch.page_counts.sum())
    for tensor in (pair.flashinfer.layers[0].keys, pair.flashinfer.layers[0].values):
        tensor[torch.from_numpy(gone).long().to(CUDA)] = float("nan")
    out = pair.flashinfer.attend(pair.flashinfer.plan(sent(windowed)), 0, query, key, value, pair.sinks)
    assert relative_error(out, right) <= LIMIT[dtype]
    if backend == "batch_invariant":
        assert torch.equal(out, before)


def gemma() -> Gemma3TextConfig:
    return Gemma3TextConfig(**sizes(), query_pre_attn_scalar=64, layer_types=kinds())


def llama4() -> Llama4TextConfig:
    """Without experts, whose matmuls are not batch-invariant."""
    own = sizes() | {"intermediate_size_mlp": 512, "moe_layers": [], "no_rope_layers": [1] * 5 + [0], "floor_scale": 32}
    del own["sliding_window"]
    return Llama4TextConfig(**own, attention_chunk_size=WINDOW)


def kinds() -> list[str]:
    """Five sliding layers, then a full one."""
    return ["sliding_attention"] * 5 + ["full_attention"]


def sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": WINDOW,
        "max_position_embeddings": LONGEST,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


@cache
def target_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    made = {"gemma3": gemma, "llama4": llama4}
    config = made[kind]() if kind in made else GptOssConfig(
        **sizes(), num_local_experts=4, num_experts_per_tok=2, layer_types=kinds(),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    config.tie_word_embeddings = False
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(20)  # type: ignore[operator, union-attr]  # clear winners
    return model.to(torch.bfloat16).to(CUDA)  # type: ignore[arg-type]


def head_of(target: PreTrainedModel) -> Eagle3Head:
    torch.manual_seed(1)
    spec = Eagle3Spec(
        hidden_size=256,
        target_hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        aux_layers=(1, 3, 4),
    )
    head = Eagle3Head(spec, target.get_input_embeddings().weight.float().cpu()).eval().requires_grad_(False)  # type: ignore[operator, arg-type]
    head.lm_head.weight.mul_(20)
    return head.to(CUDA, torch.bfloat16)


PROMPTS = [
    torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 900, 17, 400, 1300, 64)
]


def model(kind: str, drafts: int, graphs: bool, hybrid: bool, **options: Any) -> SpeculativeModel:
    target = target_of(kind)
    return SpeculativeModel.from_pretrained(
        target,
        head_of(target) if drafts else None,
        num_speculative_tokens=drafts or None,
        tokenizer=Tokenizer(),
        max_num_seqs=4,
        cuda_graphs=graphs,
        hybrid_kv_cache=hybrid,
        kv_cache_tokens=8192,
        **{"backend": "flashinfer", "max_num_batched_tokens": 2048, **options},
    )


def answers(loaded: SpeculativeModel, drafts: int) -> list[Completion]:
    with loaded:
        completions = loaded.generate(PROMPTS, SamplingParams(max_new_tokens=96, return_drafts=bool(drafts)))
        assert free_everywhere(loaded)
    return completions


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "llama4"])
def test_groups_give_the_tokens_and_drafts_of_one_group(
    kind: str, drafts: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = answers(model(kind, drafts, graphs, hybrid=False), drafts)
    replanned = count_calls(monkeypatch, FixedPlanner, "replan")
    loaded = model(kind, drafts, graphs, hybrid=True)
    assert isinstance(loaded.target.runner, GroupedRunner) and loaded.graphs.startswith("on" if graphs else "off")
    (pool,) = loaded.config.windowed
    assert pool.reach == Reach(WINDOW, WINDOW if kind == "llama4" else 1) and pool.num_pages * 16 < 8192
    grouped = answers(loaded, drafts)
    assert any(host.other_groups for (host,) in replanned) == graphs
    assert agreement([c.token_ids for c in grouped], [c.token_ids for c in right]) >= 0.97
    if drafts:
        assert agreement(drafted(grouped), drafted(right)) >= 0.97


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_batch_invariant_answers_are_the_same_bits(kind: str) -> None:
    """With drafts and without, with groups and without: lists begin where tiles do."""
    options = {"backend": "batch_invariant"}
    right = answers(model(kind, 0, True, hybrid=False, **options), 0)
    for drafts in (0, 5):
        grouped = answers(model(kind, drafts, True, hybrid=True, **options), drafts)
        assert [c.token_ids for c in grouped] == [c.token_ids for c in right]


def test_memory_is_divided_by_what_rows_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default on a GPU: pools of both groups fit into what is left, and hold far more than one group would.

    Loading sees 6 GiB free, of which four are reserved. What is really free changes with other processes on
    this GPU, and sizes made from it would take what these free between two looks.
    """
    target = target_of("gemma3")
    options: dict[str, Any] = {"tokenizer": Tokenizer(), "backend": "flashinfer", "cuda_graphs": False}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (6 * 2**30, 6 * 2**30))
    loads = {}
    for hybrid in (False, True):
        with SpeculativeModel.from_pretrained(
            target, max_num_seqs=2048, max_num_batched_tokens=2048, gpu_memory_utilization=1.0,
            hybrid_kv_cache=hybrid, **options,
        ) as loaded:  # fmt: skip
            loads[hybrid] = loaded.config
            loaded.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    assert loads[True].num_pages > 3.5 * loads[False].num_pages
