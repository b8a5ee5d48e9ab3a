"""Batch-invariant rounds: a token's bits do not depend on what else is in the batch, so drafts change no answer."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV2Config,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from attention.backends.invariant import InvariantBackend
from attention.batch.host import HostBatch, rows_batch
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from specdec import Completion
from specdec.errors import InvalidInputError, UnsupportedAttentionError
from specdec.model import SpeculativeModel
from specdec.ops.linear import invariant_linear
from specdec.requests.sampling import SamplingParams
from tests.gpu.test_flashinfer import (
    CUDA,
    DECODE,
    LIMIT,
    MIXED,
    VERIFY,
    Pair,
    attention_spec,
    host_batch,
    metadata_of,
    relative_error,
)
from tests.gpu.test_graph_rounds import Tokenizer

VOCAB = 4096
HALF = [torch.bfloat16, torch.float16]
SIZES = (1, 2, 6, 16, 17, 32, 33, 64, 65, 300, 512, 513, 1100)
"""Both sides of every limit between two tiles."""


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "width"), [(640, 192), (6144, 4096), (1000, 1000), (300, 14336)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_matmuls(rows: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, device=CUDA, dtype=dtype) for s in ((1100, width), (rows, width), (rows,)))
    added = bias if has_bias else None
    whole = invariant_linear(x, weight, added)
    right = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert relative_error(whole, right) <= LIMIT[dtype]
    for size in SIZES:
        for start in {0, 7, len(x) - size} if size < 1000 else {0}:
            own = invariant_linear(x[start : start + size], weight, added)
            assert torch.equal(own, whole[start : start + size]), (size, start)


def test_other_matmuls_depend_on_the_number_of_tokens() -> None:
    """The comparison can fail."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 14336, device=CUDA, dtype=torch.bfloat16) for n in (1100, 4096))
    found = [F.linear(x[:size], weight)[0] for size in SIZES]
    assert not all(torch.equal(own, found[0]) for own in found)


KINDS = {
    "plain": {},
    "window": {"window": 100},
    "softcap": {"softcap": 30.0},
    "sinks": {"has_sinks": True},
    "both": {"window": 33, "softcap": 20.0},
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "dim", "page_size", "layout"), [((32, 8), 128, 16, "NHD"), ((6, 2), 64, 1, "HND")])
@pytest.mark.parametrize("batch", [DECODE, VERIFY, MIXED])
def test_attention_equals_the_reference(
    batch: Any, heads: tuple[int, int], dim: int, page_size: int, layout: str, kind: str, dtype: torch.dtype
) -> None:
    ours = Pair(attention_spec(heads, dim, **KINDS[kind]), dtype, page_size, layout, backend=InvariantBackend())
    metadata = metadata_of(host_batch(*batch, page_size))
    states = ours.states(metadata.num_tokens)
    out = ours.flashinfer.attend(ours.flashinfer.plan(metadata), 0, *states, ours.sinks)
    expected = ours.expected(metadata, states)
    for a, b in pairwise(metadata.host.query_start_loc.tolist()):
        assert relative_error(out[a:b], expected[a:b]) <= 2 * LIMIT[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((6, 2), 64), ((8, 1), 256)])
def test_attention_in_pieces(heads: tuple[int, int], dim: int, kind: str, dtype: torch.dtype) -> None:
    """A row of 700 tokens at once; and cut up, beside a row of its own."""
    ours = Pair(attention_spec(heads, dim, **KINDS[kind]), dtype, backend=InvariantBackend())
    pages = np.random.default_rng(0).permutation(np.arange(1, 60)).astype(np.int32)
    states = ours.states(700)

    def attended(batch: HostBatch, tokens: list[torch.Tensor]) -> torch.Tensor:
        metadata = metadata_of(batch)
        return ours.flashinfer.attend(ours.flashinfer.plan(metadata), 0, *tokens, ours.sinks)

    whole = attended(rows_batch(np.array([0, 700]), np.array([0]), pages[None, :44], 16), states)
    cuts = [0, 1, 7, 40, 127, 128, 129, 400, 406, 693, 699, 700]
    table = np.zeros((2, 44), np.int32)
    table[0], table[1, :2] = pages[:44], pages[44:46]
    for a, b in pairwise(cuts):
        beside = [torch.cat([x[a:b], x[:20]]) for x in states]
        out = attended(rows_batch(np.array([0, b - a, b - a + 20]), np.array([a, 0]), table, 16), beside)
        assert torch.equal(out[: b - a], whole[a:b]), (a, b)
        assert torch.equal(out[b - a :], whole[:20])


CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "gemma2": Gemma2Config,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v2": DeepseekV2Config,
    "qwen3_next": Qwen3NextConfig,
    "bamba": BambaConfig,
}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 512}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 32},
    "qwen3_moe": {"num_experts": 16, **_EXPERTS},
    "deepseek_v2": {
        "n_routed_experts": 16,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_key_value_heads": 16,
        **_EXPERTS,
    },
    "qwen3_next": {
        "num_experts": 16,
        "shared_expert_intermediate_size": 512,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        **_EXPERTS,
    },
    "bamba": {
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
}
"""Of mixtures, rounds of 2,048 tokens have more than 48 pairs an expert: another kernel than of a few tokens."""
QUESTIONS = [
    torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in [*range(3, 60), 200, 300]
]


@cache
def made(kind: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Eagle3Head]:
    """A target whose logits are close together, so that rounding decides many tokens, and a head for its width."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    arguments: dict[str, Any] = {**sizes, **heads, **ids, **OWN.get(kind, {}), "max_position_embeddings": 1024}
    config = CONFIGS[kind](**arguments)
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in target.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    spec = Eagle3Spec(
        hidden_size=1024,
        target_hidden_size=1024,
        intermediate_size=1024,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        aux_layers=(1, 2, 3),
    )
    head = Eagle3Head(spec, target.get_input_embeddings().weight).eval().requires_grad_(False)
    return target.to(CUDA, dtype), head.to(CUDA, dtype)


def loaded(
    backend: str, dtype: torch.dtype, drafts: int, rows: int, batched: int, kind: str = "llama", **options: str
) -> SpeculativeModel:
    """A copy of a random target, with its head where drafts are made, from CUDA graphs."""
    target, head = made(kind, dtype)
    return SpeculativeModel.from_pretrained(
        copy.deepcopy(target),
        head if drafts else None,
        num_speculative_tokens=drafts or None,
        backend=backend,
        tokenizer=Tokenizer(),
        max_num_seqs=rows,
        max_model_len=512,
        max_num_batched_tokens=batched,
        cuda_graphs=True,
        **options,
    )


def generated(
    backend: str, dtype: torch.dtype, drafts: int, rows: int, batched: int, kind: str = "llama"
) -> list[tuple[list[int], list[float]]]:
    """Answers to all questions, and their log-probabilities.

    Random models soon repeat themselves: many short answers have more to decide.
    """
    model = loaded(backend, dtype, drafts, rows, batched, kind)
    done = model.generate(QUESTIONS, SamplingParams(max_new_tokens=12, logprobs=0))
    return [(c.token_ids, [each.logprob for each in c.logprobs or ()]) for c in done]


@pytest.mark.parametrize(
    ("kind", "dtype", "others"),
    [
        ("llama", torch.bfloat16, [(5, 8, 2048), (2, 1, 64)]),
        ("llama", torch.float16, [(5, 3, 100)]),
        ("qwen2", torch.bfloat16, [(5, 3, 100)]),
        ("gemma2", torch.bfloat16, [(5, 3, 100)]),
        ("qwen3_moe", torch.bfloat16, [(5, 8, 2048), (2, 1, 64)]),
        ("qwen3_moe", torch.float16, [(5, 3, 100)]),
        ("deepseek_v2", torch.bfloat16, [(5, 8, 2048), (2, 1, 64)]),
        ("qwen3_next", torch.bfloat16, [(5, 8, 2048), (2, 1, 64)]),
        ("bamba", torch.bfloat16, [(5, 3, 100)]),
    ],
)
def test_drafts_and_batches_change_no_answer(kind: str, dtype: torch.dtype, others: list[tuple[int, int, int]]) -> None:
    """Other drafts, rows and chunks of prompts: other graphs and other rounds beside them. Qwen2 adds biases, Gemma2
    has windows, softcaps and norms that stay the compiler's, DeepSeek MLA and a router in float32, the last two
    recurrent layers."""
    plain = generated("batch_invariant", dtype, 0, 8, 2048, kind)
    for other in others:
        assert generated("batch_invariant", dtype, *other, kind) == plain, other


def test_without_it_rounding_decides() -> None:
    """The comparison can fail."""
    drafts, plain = (generated("flashinfer", torch.bfloat16, k, 8, 2048) for k in (5, 0))
    assert drafts != plain


SEEDED = [
    SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.95, seed=i, return_drafts=True)
    for i in range(len(QUESTIONS))
]


def sampled(
    drafts: int, rows: int, batched: int, beside_greedy: bool = False, backend: str = "batch_invariant"
) -> list[Completion]:
    """Sampled answers to all questions, with a seed each. beside_greedy: every other row is a greedy request."""
    model = loaded(backend, torch.bfloat16, drafts, rows, batched, draft_sampling="greedy")
    greedy = SamplingParams(max_new_tokens=9)
    each = 2 if beside_greedy else 1
    asked = [params for own in SEEDED for params in (own, greedy)[:each]]
    return model.generate([q for q in QUESTIONS for _ in range(each)], asked)[::each]


OTHER_BATCHES = [(8, 2048, False), (3, 100, False), (8, 2048, True)]
"""Rows, chunks of prompts, greedy rows among sampled ones; compared with one row at a time."""


@pytest.mark.parametrize("batch", OTHER_BATCHES)
def test_a_seed_gives_the_same_answers_in_any_batch(batch: tuple[int, int, bool]) -> None:
    alone = sampled(0, 1, 64)
    assert [c.token_ids for c in sampled(0, *batch)] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) > 50


@pytest.mark.parametrize("batch", OTHER_BATCHES)
def test_a_seed_with_drafts_gives_the_same_rounds_until_the_head_drafts_otherwise(
    batch: tuple[int, int, bool],
) -> None:
    """The head is compiled as usual and rounds by the batch. As long as it drafts the same ids, judged as certain, the
    rounds are the same: what they accept, and the tokens they emit."""
    compared = total = 0
    for one, other in zip(sampled(3, 1, 64), sampled(3, *batch), strict=True):
        assert one.token_ids[0] == other.token_ids[0]  # of the prompt
        assert one.drafts is not None and other.drafts is not None
        place, total = 1, total + len(one.drafts)
        rounds = zip(one.drafts, other.drafts, one.stats.rounds, other.stats.rounds, strict=False)
        for ours, theirs, a, b in rounds:
            if tuple(ours) != tuple(theirs):
                break
            emitted = slice(place, place + a.emitted)
            assert a == b and one.token_ids[emitted] == other.token_ids[emitted]
            place, compared = place + a.emitted, compared + 1
    assert compared > 0.5 * total


def test_without_it_rounding_decides_sampled_tokens_too() -> None:
    """The comparison can fail."""
    alone, together = (sampled(0, *batch, backend="flashinfer") for batch in ((1, 64), (8, 2048)))
    assert [c.token_ids for c in alone] != [c.token_ids for c in together]


def load(**options: Any) -> SpeculativeModel:
    target, _ = made("llama", torch.bfloat16)
    return SpeculativeModel.from_pretrained(
        target, tokenizer=Tokenizer(), max_model_len=256, max_num_seqs=2, backend="batch_invariant", **options
    )


def test_what_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="backend='batch_invariant' needs cuda_graphs=True"):
        load(cuda_graphs=False)
    with pytest.raises(UnsupportedAttentionError, match="no cache in 8 bits"):
        load(cuda_graphs=True, kv_cache_dtype="fp8")
