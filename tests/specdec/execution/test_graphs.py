"""The graph executor's bookkeeping on a CPU: a "graph" is a launch that runs again on the same buffers when replayed.

What a real capture fixes is fixed here too: addresses (one device buffer in the arena), shapes, and the plan's place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import (
    VOCAB,
    backend_of_ours,
    check_mode,
    count_calls,
    eagle3_head,
    engine_of,
    enlarge,
    experts_form,
    free_everywhere,
    hf_greedy,
    launch_ahead,
    random_prompts,
    results_of,
    table_head,
    tiny_llama,
    wrap,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table
from transformers import AutoModelForCausalLM, DeepseekV2Config

import specdec.compiler.compiling
import specdec.execution.capture
import specdec.execution.graphs
import specdec.execution.ragged
from attention.backends.reference import TorchBackend
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.spec import AttentionSpec
from drafters.loops.base import Chosen
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpSpec, mtp_target
from specdec.compiler.compiling import compiler_settings
from specdec.compiler.passes import Rewriting
from specdec.engine.launcher import Launcher
from specdec.engine.scheduler import Scheduler
from specdec.errors import ModelChangedError, RoundFailedError
from specdec.execution.graphs import GraphExecutor
from specdec.execution.readback import HostReads
from specdec.ops.mixtures.choice import CAPTURABLE, using_capturable_experts
from specdec.requests.sampling import SamplingParams
from specdec.rounds.buckets import graph_rows
from specdec.rounds.randomness import SamplingRound
from tests.sampled_rounds import kernels_by_reference

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))


class Box:
    """A plan's fixed place."""

    plan: Any = None


class FixedPlaceBackend(TorchBackend):
    """The torch reference, with plans that stay where they are."""

    def fixed_builder(
        self,
        group: Any,
        key: AttentionSpec,
        dtype: torch.dtype,
        rows: int,
        query_len: int,
        beside: Any = None,
        tokens: int | None = None,
    ) -> Any:
        return FixedPlaceBuilder(self.builder(group, key, dtype), group, rows, query_len, tokens)

    def run(self, plan: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().run(plan.plan if isinstance(plan, Box) else plan, *args, **kwargs)


class FixedPlaceBuilder:
    def __init__(self, builder: Any, group: Any, rows: int, query_len: int, tokens: int | None = None) -> None:
        self.group, self.tokens = group, tokens
        self.builder, self.rows, self.query_len, self.box = builder, rows, query_len, Box()

    def build(self, metadata: CommonAttentionMetadata) -> Box:
        self.metadata = metadata
        self.replan(metadata.host)
        return self.box

    def replan(self, host: HostBatch) -> None:
        lens = host.query_lens.tolist()
        if self.tokens is None:
            assert lens == [self.query_len] * self.rows
        else:
            assert len(lens) == self.rows and sum(lens) == self.tokens and max(lens) <= self.query_len
        self.box.plan = self.builder.build(replace(self.metadata, host=host))


def leave(result: Any, again: Any) -> None:
    """Results where they were the first time."""
    if isinstance(result, Chosen):
        result, again = vars(result).values(), vars(again).values()
    if isinstance(result, torch.Tensor):
        result.copy_(again)
    elif result is not None:
        for kept, new in zip(result, again, strict=True):
            leave(kept, new)


class Replayed:
    """Runs a launch again and leaves its results where they were the first time."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self.launch, self.result, self.replays = launch, launch(), 0

    def replay(self) -> None:
        self.replays += 1
        with check_mode(False), torch.inference_mode(False), torch.no_grad():  # no Python is left of a captured launch
            leave(self.result, self.launch())


class ReplayedSegments:
    """Runs a launch again with the attention that the round brings; that leaves the padding as it is."""

    def __init__(self, launch: Callable[[Any, Any], Any], others: Any) -> None:
        self.launch, self.num_graphs = launch, 1
        self.result = launch(self.cut, None if others is None else others.blank())

    def cut(self, layer: int, query: torch.Tensor, key: Any, value: torch.Tensor, sinks: Any) -> torch.Tensor:
        self.num_graphs += 1
        return query.new_zeros(len(query), query.shape[1], value.shape[2])

    def replay(self, plan: Any) -> None:
        between = plan()

        def served(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any) -> torch.Tensor:
            out = query.new_full((len(query), query.shape[1], value.shape[2]), float("nan"))  # noise must not spread
            assert between.attend(layer, query, key, value, sinks, out) is out
            return out

        with check_mode(False), torch.inference_mode(False), torch.no_grad():
            leave(self.result, self.launch(served, between.serving))


def record_segments(
    launch: Callable[[Any, Any], Any], pool: Any, group: Any, others: Any = None
) -> tuple[ReplayedSegments, Any]:
    recorded = ReplayedSegments(launch, others)
    return recorded, recorded.result


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """From now on graphs are launches that run again; they are in the list that is returned."""
    recorded: list[Replayed] = []

    def record(launch: Callable[[], Any], pool: Any, group: Any) -> tuple[Replayed, Any]:
        recorded.append(Replayed(launch))
        return recorded[-1], recorded[-1].result

    monkeypatch.setattr(specdec.execution.capture, "record", record)
    monkeypatch.setattr(specdec.execution.ragged, "record_segments", record_segments)
    monkeypatch.setattr("attention.staging._RING", 1)
    for name, result in (("memory_reserved", 0), ("graph_pool_handle", None), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda result=result: result)
    return recorded


def compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on models of the graph executor run as they are."""
    monkeypatch.setattr(specdec.execution.graphs, "compiled_model", lambda model: model)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def recorded_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Replayed]]:
    """What decides and drafts sampled rows, which is captured for every model, is the kernels' torch reference."""
    with kernels_by_reference():
        yield record_on_cpu(monkeypatch)


@pytest.fixture
def graphs_on_cpu(recorded_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Without the compiler."""
    compile_nothing(monkeypatch)
    return recorded_on_cpu


def traced_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on the compiler only traces; the graphs that it traces, as they come."""
    traced, compiler = list[Any](), torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, **{**options, "backend": backend}))
    return traced


def with_graphs(head: Any, target: Any = None, backend: Any = None, **options: Any) -> Any:
    with backend_of_ours(backend or FixedPlaceBackend(torch.device("cpu"))):
        wrapped = wrap(tiny_llama() if target is None else target, head, cuda_graphs=True, **options)
    launch_ahead(wrapped)
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawn", "planted"),
    [
        ("probabilistic", False),
        *(pytest.param(drawn, True, marks=pytest.mark.long) for drawn in ("probabilistic", "greedy")),
    ],
)
def test_sampled_rows_draft_and_verify_beside_greedy_ones_as_eagerly(
    graphs_on_cpu: list[Replayed], drawn: str, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft ids, given the uniforms, are those of the eager loop, whose greedy ones are the oracle's.

    Planted: drafts take the uniforms of the position one further on; greedy drafts take none.
    """
    if planted:
        plain = SamplingRound.ahead_uniforms
        monkeypatch.setattr(SamplingRound, "ahead_uniforms", lambda self, places: plain(self, places + 1)[:, 1:])
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}]
    settings += [{"temperature": 1.2, "top_k": 9, "min_p": 0.02}, {}, {"temperature": 2.0}]
    params = [SamplingParams(max_new_tokens=16, seed=i, return_drafts=True, **each) for i, each in enumerate(settings)]
    sizes: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 5, "draft_sampling": drawn}
    eager = wrap(tiny_llama(), table_head(tiny_llama()), **sizes).generate(PROMPTS, params)
    graphed = with_graphs(table_head(tiny_llama()), **sizes).generate(PROMPTS, params)
    same = [(a.token_ids, a.drafts) == (b.token_ids, b.drafts) for a, b in zip(eager, graphed, strict=True)]
    if planted and drawn == "probabilistic":
        assert same == [True, False, False, False, True, False]
    else:
        assert all(same)


ONE_BY_ONE = {"kv_cache_layout": "HND", "page_size": 1, "kv_cache_tokens": 88, "max_model_len": 70}
"""Options that `make test` tries in pairs."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("table", {}),
        pytest.param("table", {"page_size": 1, "kv_cache_layout": "HND"}, marks=pytest.mark.slow),
        pytest.param("table", {"max_model_len": 70, "kv_cache_tokens": 88}, marks=pytest.mark.long),
        pytest.param("eagle3", {"kv_cache_layout": "HND", "kv_cache_tokens": 88}, marks=pytest.mark.slow),
        *(pytest.param("table", {name: value}, marks=pytest.mark.long) for name, value in ONE_BY_ONE.items()),
        pytest.param("eagle3", {}, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_tokens_and_drafts_are_those_of_the_eager_path(
    graphs_on_cpu: list[Replayed], kind: str, options: dict[str, Any]
) -> None:
    sizes = {"num_speculative_tokens": 3, "max_num_seqs": 5, **options}
    make = table_head if kind == "table" else eagle3_head
    params = SamplingParams(max_new_tokens=24, return_drafts=True)
    eager = wrap(tiny_llama(), make(tiny_llama()), **sizes).generate(PROMPTS, params)
    graphed = with_graphs(make(tiny_llama()), **sizes)
    completions = graphed.generate(PROMPTS, params)
    most = options.get("max_model_len", 128)
    assert [c.token_ids for c in completions] == [hf_greedy(p, min(24, most - len(p))) for p in PROMPTS]
    assert [c.drafts for c in completions] == [c.drafts for c in eager]
    assert sum(g.replays for g in graphs_on_cpu) > 30
    assert free_everywhere(graphed)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, pytest.param(1, marks=pytest.mark.long), 5])
@pytest.mark.thorough
def test_rows_that_run_to_the_last_position_there_is(graphs_on_cpu: list[Replayed], num_drafts: int) -> None:
    """What is reserved for the round after a launched one is no more than the block tables hold."""
    head = table_head(tiny_llama()) if num_drafts else None
    sizes = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 16, "max_num_batched_tokens": 64}
    graphed = with_graphs(head, num_speculative_tokens=num_drafts, **sizes)
    prompts = [prompt[:40] for prompt in PROMPTS]
    completions = graphed.generate(prompts, SamplingParams(max_new_tokens=100))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 64 - len(p)) for p in prompts]
    assert free_everywhere(graphed)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.cases(1)
def test_every_number_of_drafts(graphs_on_cpu: list[Replayed], num_drafts: int) -> None:
    head = table_head(tiny_llama()) if num_drafts else None
    graphed = with_graphs(head, num_speculative_tokens=num_drafts, max_num_seqs=3)
    completions = graphed.generate(PROMPTS, SamplingParams(max_new_tokens=16))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 16) for p in PROMPTS]
    assert sum(g.replays for g in graphs_on_cpu) > 20


@pytest.mark.slow
def test_sampled_rows_among_greedy_ones_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same seed and K: the graph executor draws what the eager one draws; its kernels run in Triton's interpreter."""
    recorded = record_on_cpu(monkeypatch)
    compile_nothing(monkeypatch)
    params = [SamplingParams(max_new_tokens=8, temperature=t, seed=i) for i, t in enumerate((1.0, 0, 0.7))]
    sizes = {"num_speculative_tokens": 3, "max_num_seqs": 2}
    eager = wrap(tiny_llama(), table_head(tiny_llama()), **sizes).generate(PROMPTS[:3], params)
    graphed = with_graphs(table_head(tiny_llama()), **sizes).generate(PROMPTS[:3], params)
    assert [c.token_ids for c in graphed] == [c.token_ids for c in eager]
    assert any(g.replays for g in recorded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_drafts", "temperature"),
    [(5, 0.9), *(pytest.param(*own, marks=pytest.mark.long) for own in ((3, 0.0), (0, 0.9), (3, 0.9)))],
)
@pytest.mark.thorough
def test_a_preempted_row_joins_again_at_its_bonus_token(
    graphs_on_cpu: list[Replayed], num_drafts: int, temperature: float
) -> None:
    """Rounds that prefill run by segments; the row that is done drafts there and is verified as it would be alone."""
    params = [
        SamplingParams(max_new_tokens=28, temperature=temperature, seed=i, return_drafts=True)
        for i in range(len(PROMPTS))
    ]
    head = table_head(tiny_llama()) if num_drafts else None
    sizes = {"num_speculative_tokens": num_drafts, "max_num_seqs": 5, "max_num_batched_tokens": 30}
    roomy = wrap(tiny_llama(), head, **sizes)
    alone = [roomy.generate([p], s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    graphed = with_graphs(head, **sizes, kv_cache_tokens=92)
    together = graphed.generate(PROMPTS, params)
    assert sum(c.stats.preemptions > 0 for c in together) >= 2
    assert [(c.token_ids, c.drafts, c.stats.rounds) for c in together] == [
        (c.token_ids, c.drafts, c.stats.rounds) for c in alone
    ]
    assert sum(g.replays for g in graphs_on_cpu) > 30
    assert free_everywhere(graphed)


@pytest.mark.slow
@pytest.mark.thorough
def test_compiled_code_gives_the_same_tokens_and_drafts(recorded_on_cpu: list[Replayed]) -> None:
    """With torch.compile, fused siblings and aux hidden states that leave the compiled forward as outputs (float32)."""
    sizes = {"num_speculative_tokens": 3, "max_num_seqs": 4}
    params = SamplingParams(max_new_tokens=24, return_drafts=True)
    eager = wrap(tiny_llama(), eagle3_head(tiny_llama()), **sizes).generate(PROMPTS, params)
    graphed = with_graphs(eagle3_head(tiny_llama()), **sizes)
    completions = graphed.generate(PROMPTS, params)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    assert [c.drafts for c in completions] == [c.drafts for c in eager]
    assert graphed.engine.executor.report.fused_groups == 2 * 4 + 2
    assert sum(g.replays for g in recorded_on_cpu) > 30


@pytest.mark.slow
@pytest.mark.thorough
def test_norms_and_rotations_of_the_target_are_operators_of_ours(
    recorded_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision, through the attention port, and over the border between two layers: the regions before the
    first attention (whose norm has no residual before it), between two and after the last one, each compiled once.

    No kernels are made: a region runs operator by operator, as our pass leaves it.
    """
    graphs: list[Counter[str]] = []

    def compile_inference(module: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        assert isinstance(inductor.post_grad_custom_pre_pass, Rewriting)
        inductor.post_grad_custom_pre_pass(module.graph)
        graphs.append(Counter(str(node.target) for node in module.graph.nodes))
        module.recompile()
        return module

    compiler = aot_autograd(fw_compiler=compile_inference, decompositions=select_decomp_table())
    monkeypatch.setattr(specdec.compiler.compiling, "compile_fx", compiler)
    with_graphs(None, tiny_llama().to(torch.bfloat16), num_speculative_tokens=0, max_num_seqs=2)
    names = ("rms_norm", "add_rms_norm", "rotated")
    found = [[graph[f"specdec.{name}.default"] for name in names] for graph in graphs]
    assert found == [[1, 0, 1], [0, 2, 1], [0, 2, 0]]


@pytest.mark.slow
def test_an_altered_model_is_refused_before_it_says_anything(graphs_on_cpu: list[Replayed]) -> None:
    """By a check that runs while the device does. It ends no request but those of the call; then all is as before.

    Only a round that would have to capture the altered model fails as a whole.
    """
    sizes = {"num_speculative_tokens": 3, "max_num_batched_tokens": 300, "kv_cache_tokens": 900}
    wrapped = with_graphs(table_head(tiny_llama()), **sizes)
    params, part = SamplingParams(max_new_tokens=24), wrapped.hf_model.model.layers[1].self_attn
    for scale in (1, 2):  # first without, so that what these rounds need is captured
        running = wrapped.stream(PROMPTS[0], params)
        tokens = list(next(running).token_ids)
        part.scaling *= scale
        altered = wrapped.stream(PROMPTS[1], params)
        with nullcontext() if scale == 1 else pytest.raises(ModelChangedError, match="scaling was"):
            next(altered)
        altered.close()
    tokens += [token for update in running for token in update.token_ids]
    assert tokens == hf_greedy(PROMPTS[0], 24)
    late = random_prompts((90,), seed=5)[0]  # its graphs are captured with its first round: of another model
    with pytest.raises(RoundFailedError, match="scaling was"):
        wrapped.generate(late, params)
    part.scaling /= 2
    assert [c.token_ids for c in wrapped.generate([PROMPTS[1], late], params)] == [
        hf_greedy(prompt, 24) for prompt in (PROMPTS[1], late)
    ]
    assert free_everywhere(wrapped)


@pytest.mark.long
def test_a_stale_plan_would_be_noticed(graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted defect: the verification is not planned anew."""
    graphed = with_graphs(table_head(tiny_llama()), num_speculative_tokens=3, max_num_seqs=5)
    verification = graphed.target.runner.group
    replan = FixedPlaceBuilder.replan

    def stale(self: FixedPlaceBuilder, host: HostBatch) -> None:
        if self.group is not verification:
            replan(self, host)

    monkeypatch.setattr(FixedPlaceBuilder, "replan", stale)
    completions = graphed.generate(PROMPTS, SamplingParams(max_new_tokens=24))
    assert [c.token_ids for c in completions] != [hf_greedy(p, 24) for p in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_drafts", "drawn", "sampled"),
    [
        (0, "greedy", 2),
        pytest.param(1, "probabilistic", 6, marks=pytest.mark.long),
        (3, "probabilistic", 12),
        (3, "greedy", 3),
    ],
)
@pytest.mark.cases(1)
def test_every_captured_graph_is_reported(
    graphs_on_cpu: list[Replayed], num_drafts: int, drawn: str, sampled: int
) -> None:
    """Buckets of 4, 2 and 1 rows (4 and 2 where nothing is drafted): a verification, K passes of the head; for sampled
    rows the decision and, where drafts are drawn, K draws. By segments: two sizes, cut at every attention; the target's
    larger one for few and for many logits indices.
    """
    graphed = with_graphs(
        table_head(tiny_llama()) if num_drafts else None,
        num_speculative_tokens=num_drafts,
        max_num_seqs=4,
        draft_sampling=drawn,
        max_num_batched_tokens=256,
    )
    report = graphed.engine.executor.report
    assert (report.graphs, report.sampled_graphs) == ((1 + num_drafts) * len(report.rows), sampled)
    assert report.graphs + report.sampled_graphs == len(graphs_on_cpu)
    layers = tiny_llama().config.num_hidden_layers
    assert report.segment_graphs == 3 * (layers + 1) + (2 * (1 + 1) if num_drafts else 0)


@pytest.mark.slow
def test_rows_that_decode_beside_a_long_prompt_find_their_graphs(
    graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of 96 prompt tokens; two of 16 beside two rows with 3 drafts each; then the three decode."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 96, "max_num_prefill_tokens": 16}
    graphed = with_graphs(table_head(tiny_llama()), num_speculative_tokens=3, **sizes)
    captured: list[Any] = []

    def noted(launch: Callable[[Any], Any], *args: Any) -> Any:
        captured.append(launch)
        return record_segments(launch, *args)

    monkeypatch.setattr(specdec.execution.ragged, "record_segments", noted)
    prompts = random_prompts((5, 9, 96 - 5 - 9 + 2 * 16))
    completions = graphed.generate(prompts, SamplingParams(max_new_tokens=12))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 12) for p in prompts]
    assert not captured
    graphed.generate(random_prompts((70,)), SamplingParams(max_new_tokens=1))
    assert not captured, "70 tokens run in the largest bucket"


def test_buckets() -> None:
    assert graph_rows(12, 6) == (12, 8, 4, 2, 1)
    assert graph_rows(1, 1) == (2,)
    assert graph_rows(128, 6)[:2] == (128, 64)


@pytest.mark.slow
def test_matmuls_of_rounds_full_of_prompts_are_timed_too(
    graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(specdec.execution.graphs, "choose_products", lambda readers, _: given.extend(readers) or "")
    sizes = {"num_speculative_tokens": 2, "max_num_seqs": 40, "max_num_batched_tokens": 900}
    target = tiny_llama()
    with_graphs(table_head(tiny_llama()), target, max_num_prefill_tokens=300, **sizes)
    tokens = {module: set(numbers) for module, numbers in given}
    assert tokens[target.model] == set(range(64, 385, 64)) and 300 + 40 * 3 - 36 == 384  # a tile is not begun for 36
    assert tokens[target] == {3 * n for n in (1, 2, 4, 8, 16, 32, 40)}


def mla_mixture_pair(dense: int = 1) -> tuple[Any, MtpHead]:
    """A tiny target with MLA and experts, dense in the first layers of three, and a module of its kind."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=2,
        n_routed_experts=4,
        first_k_dense_replace=dense,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    head = MtpHead(MtpSpec(), mtp_target(target)).eval().requires_grad_(False)
    for module in (target, head):
        enlarge(module)
    return target, head


def check_mla_mixture(drafts: int, rows: int = 4) -> None:
    sizes = {"num_speculative_tokens": drafts, "max_num_seqs": rows}
    params = SamplingParams(max_new_tokens=16, return_drafts=True)
    target, head = mla_mixture_pair()
    eager = wrap(target, head, **sizes).generate(PROMPTS, params)
    target, head = mla_mixture_pair()
    graphed = with_graphs(head, target, **sizes)
    with compiler_settings(), using_capturable_experts(target, head):  # a real replay compiles nothing anew
        completions = graphed.generate(PROMPTS, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in eager]
    assert [c.drafts for c in completions] == [c.drafts for c in eager]
    assert experts_form(target) != CAPTURABLE  # the model's own form is back


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.thorough
def test_an_mla_mixture_with_its_own_module(graphs_on_cpu: list[Replayed], drafts: int) -> None:
    check_mla_mixture(drafts)
    assert sum(g.replays for g in graphs_on_cpu) > 20


@pytest.mark.long
def test_an_mla_mixture_is_one_compiled_graph(recorded_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and module traced without a break; what they compute is that of the eager path."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, **{**options, "backend": "aot_eager"}))
    plain = specdec.execution.capture.record

    def record(launch: Callable[[], Any], pool: Any, group: Any) -> Any:
        launch()
        return plain(launch, pool, group)

    monkeypatch.setattr(specdec.execution.capture, "record", record)
    check_mla_mixture(2, rows=1)
    assert sum(g.replays for g in recorded_on_cpu) > 20


@pytest.mark.slow
def test_without_drafts_a_round_is_launched_before_the_last_one_is_read(
    graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than rows, limits, an eos id and a stop string: tokens are the target's own, nothing is lost."""
    graphed = with_graphs(None, num_speculative_tokens=0, max_num_seqs=3)
    plain = wrap(tiny_llama(), None, num_speculative_tokens=0, max_num_seqs=3)
    followed = count_calls(monkeypatch, GraphExecutor, "launch_next")
    first = plain.generate(PROMPTS, SamplingParams(max_new_tokens=24))
    eos = first[1].token_ids[7]
    for model in (plain, graphed):
        model.hf_model.generation_config.eos_token_id = eos
    params = [SamplingParams(max_new_tokens=n) for n in (24, 24, 3, 17, 24, 9)]
    expected = plain.generate(PROMPTS, params)
    completions = graphed.generate(PROMPTS, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in completions] == [c.finish_reason for c in expected]
    assert "eos" in [c.finish_reason for c in completions]
    assert len(followed) > 20
    assert free_everywhere(graphed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_drafts", "ahead"),
    [(3, True), (1, False), *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((1, True), (3, False)))],
)
@pytest.mark.cases(1)
def test_with_drafts_a_round_is_launched_before_the_commit(
    graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch, num_drafts: int, ahead: bool
) -> None:
    """More requests than rows, limits, an eos id and an abort: tokens and drafts stay the same."""
    target = tiny_llama()
    models = [with_graphs(table_head(target), num_speculative_tokens=num_drafts, max_num_seqs=3) for _ in range(2)]
    plain, early = models
    found: list[Any] = []
    before_commit = Launcher.before_commit
    eos = hf_greedy(PROMPTS[1], 24)[7]
    lengths = (50, 50, 3, 40, 50, 9)

    def answers(model: Any) -> list[tuple[list[int], Any, Any]]:
        launch_ahead(model, ahead)
        engine = engine_of(model)
        params = [SamplingParams(max_new_tokens=n, return_drafts=True) for n in lengths]
        ids = [engine.submit(p, own, eos_token_ids=[eos]) for p, own in zip(PROMPTS, params, strict=True)]
        done = {}
        while engine.has_work:
            updates = engine.step()
            if len(done) == 3:
                engine.abort([ids[4]])
            done |= {u.request_id: u.completion for u in updates if u.completion is not None}
        return [(c.token_ids, c.finish_reason, c.drafts) for _, c in sorted(done.items())]

    with monkeypatch.context() as without:
        without.setattr(Launcher, "before_commit", lambda *_: None)
        expected = answers(plain)
    monkeypatch.setattr(Launcher, "before_commit", lambda *args: (found.append(before_commit(*args)), found[-1])[1])
    assert answers(early) == expected
    assert {reason for _, reason, _ in expected} == {"eos", "length"} and len(expected) == 5
    launched = sum(upcoming is not None for upcoming in found)
    assert 8 <= launched < early.engine_stats.rounds - 8
    assert free_everywhere(early)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.cases(1)
def test_no_read_is_larger_than_its_buffer(
    graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """A model for one row, whose graphs have two where nothing is drafted; a CPU's reads have no buffers."""
    reads = count_calls(monkeypatch, HostReads, "start")
    head = table_head(tiny_llama()) if num_drafts else None
    graphed = with_graphs(head, num_speculative_tokens=num_drafts, max_num_seqs=1)
    assert [c.token_ids for c in graphed.generate(PROMPTS[:2], SamplingParams(max_new_tokens=12))] == [
        hf_greedy(prompt, 12) for prompt in PROMPTS[:2]
    ]
    assert 0 < max(result.packed.numel() for result, *_ in reads) <= 2 * (num_drafts + 1)


@pytest.mark.slow
def test_nothing_is_launched_ahead_when_somebody_could_join(
    graphs_on_cpu: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = with_graphs(None, num_speculative_tokens=0, max_num_seqs=3)
    followed = count_calls(monkeypatch, GraphExecutor, "launch_next")
    engine = engine_of(graphed)
    schedules = results_of(monkeypatch, Scheduler, "schedule")
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=20))
    for _ in range(4):
        engine.step()
    before = len(followed)
    assert before
    engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=20))
    engine.step()
    assert len(followed) == before, "the waiting request has to be let in first"
    engine.step()
    assert len(schedules[-1].rows) == 2
