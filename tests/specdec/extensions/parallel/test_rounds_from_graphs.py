"""Rounds from graphs among two ranks, on a CPU: graphs are launches that run again (tests/specdec/execution)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import LetterTokenizer

from specdec import SamplingParams, SpeculativeModel
from specdec.engine.launcher import Launcher
from specdec.execution.graphs import GraphExecutor
from specdec.extensions.parallel.engine import differing_ids
from tests.specdec.extensions.parallel import on_ranks

pytest.importorskip("triton", reason="Triton is not installed")

TEXTS = ["Anna has 12 apples and buys 8 more.", "Tom reads 7 pages a day.", "A box holds 6 eggs."]
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.95, seed=3, ignore_eos=True)


@pytest.fixture
def graphs(two_ranks: Any, folders: Callable[[str], Path]) -> Iterator[Callable[[bool], None]]:
    """Call it, and every rank captures on its CPU, compiled or not."""
    with SpeculativeModel.from_pretrained(
        folders("one-kv-head"), tensor_parallel_size=2, device="cpu", tokenizer=LetterTokenizer(), kv_cache_tokens=99
    ) as messenger:
        yield lambda compiled: messenger.engine.run(on_ranks.graphs_on_cpu, compiled)  # type: ignore[attr-defined]
        messenger.engine.run(on_ranks.no_graphs_on_cpu)  # type: ignore[attr-defined]


def tokens(model: Any, params: Any) -> list[Any]:
    return [(answer.token_ids, answer.drafts) for answer in model.generate(TEXTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["auto", pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_they_are_the_rounds_of_one_rank(
    graphs: Callable[[bool], None], draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, sampled ones and both, prompts beside rows that decode, rounds launched before a commit or read."""
    graphs(False)
    ahead: list[Any] = []
    for name in ("before_read", "before_commit"):
        plain = getattr(Launcher, name)

        def noted(*args: Any, plain: Any = plain) -> Any:
            found = plain(*args)
            ahead.append(found)
            return found

        monkeypatch.setattr(Launcher, name, noted)
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "num_speculative_tokens": 3 if draft else 0, "device": "cpu"}
    mixed = [replace(each, return_drafts=True) for each in (GREEDY, SAMPLED, GREEDY)]
    found = []
    for options in ({}, {"tensor_parallel_size": 2}):
        with SpeculativeModel.from_pretrained("gsm-llama", draft, cuda_graphs=True, **sizes, **options) as model:
            assert isinstance(model.engine.executor, GraphExecutor) and model.graphs == "on"
            if options:
                model.engine.run(on_ranks.launch_ahead)  # type: ignore[attr-defined]
            else:
                model.engine.use(model.engine.executor, queue_verification=True)
            found.append((tokens(model, mixed[0]), tokens(model, mixed[1]), tokens(model, mixed), model.engine_stats))
            if options:
                assert differing_ids(model.engine) == [0, 0]  # type: ignore[arg-type]
    assert found[0] == found[1]
    assert any(round_ is not None for round_ in ahead)


@pytest.mark.long
@pytest.mark.parametrize("name", ["one-kv-head", "deepseek-v3"])
def test_compiled_shares_say_the_same(
    graphs: Callable[[bool], None], folders: Callable[[str], Path], name: str
) -> None:
    """With our own passes over the compiler's graph, in kernels for this CPU."""
    graphs(True)
    sizes: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "device": "cpu", "tokenizer": LetterTokenizer()}
    prompts, params = ["abcd efgh", "Hello 123"], SamplingParams(max_new_tokens=12)
    found = []
    for options in ({"cuda_graphs": False}, {"cuda_graphs": True, "tensor_parallel_size": 2}):
        with SpeculativeModel.from_pretrained(folders(name), **sizes, **options) as model:
            found.append([answer.token_ids for answer in model.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.long
def test_wrong_drafts_of_a_rank_are_overwritten_in_the_verification(graphs: Callable[[bool], None]) -> None:
    graphs(False)
    with SpeculativeModel.from_pretrained(
        *("gsm-llama", "auto"), cuda_graphs=True, device="cpu", tensor_parallel_size=2, max_model_len=64, max_num_seqs=2
    ) as model:
        engine: Any = model.engine
        engine.run(on_ranks.launch_ahead)
        right = tokens(model, replace(GREEDY, return_drafts=True))
        engine.run(on_ranks.wrong_drafts_of_graphs)
        assert tokens(model, replace(GREEDY, return_drafts=True)) == right
