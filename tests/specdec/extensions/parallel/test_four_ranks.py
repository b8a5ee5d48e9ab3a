"""Four ranks, more than KV heads: each pair of them keeps the KV head that its queries attend to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer

from drafters.eagle3.checkpoint import save_eagle3
from specdec import ModelLoadError, RanksLostError, SpeculativeModel
from tests.specdec.extensions.parallel import on_ranks
from tests.specdec.extensions.parallel.test_equal import LETTERS, SHORT_OF_PAGES, TEXTS, compare, mixed, session
from tests.specdec.extensions.parallel.test_failures import PARAMS, PROMPT, SIZES, SOON, alive, load_ends_all, pids_of


def load(folder: Path, **options: Any) -> Any:
    own = {"tokenizer": LetterTokenizer(), "device": "cpu", "tensor_parallel_size": 4, **SIZES}
    return SpeculativeModel.from_pretrained(folder, **own | options)


@pytest.fixture(scope="module")
def four_ranks(every_self_test: None, packages: None) -> Iterator[None]:
    """The other ranks' processes stay between models, until one is lost."""
    from specdec.extensions.parallel.loading import start_ranks

    link = start_ranks(4, torch.device("cpu"))
    yield
    link.close()


@pytest.mark.long
@pytest.mark.parametrize("ask", [mixed, session])
def test_llama_with_its_eagle3_head_and_preemption(four_ranks: None, ask: Callable[..., Any]) -> None:
    sizes = {"kv_cache_tokens": 112, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 64}
    stats = compare("gsm-llama", "auto", TEXTS, 4, ask, num_speculative_tokens=4, **sizes)
    assert stats.preemptions > 0


@pytest.mark.long
def test_a_tiny_model_with_a_random_head(four_ranks: None, folders: Callable[[str], Path], tmp_path: Path) -> None:
    from fakes import eagle3_head
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    head = eagle3_head(AutoModelForCausalLM.from_pretrained(folders("two-kv-heads")), aux_layers=(0, 1, 2))
    options = {"tokenizer": LetterTokenizer(), "num_speculative_tokens": 4, "max_model_len": 80, **SHORT_OF_PAGES}
    stats = compare(folders("two-kv-heads"), str(save_eagle3(head, tmp_path / "head")), LETTERS, 4, **options)
    assert stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("two-kv-heads", mixed),
        *(pytest.param(name, session, marks=pytest.mark.long) for name in ("two-kv-heads", "deepseek-v3")),
    ],
)
@pytest.mark.thorough
def test_tiny_models(four_ranks: None, folders: Callable[[str], Path], name: str, ask: Callable[..., Any]) -> None:
    compare(folders(name), None, LETTERS, 4, ask, tokenizer=LetterTokenizer(), **SIZES)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_load_that_fails_on_the_last_rank(four_ranks: None, folders: Callable[[str], Path]) -> None:
    """The ranks between it and rank 0 fail after it, for their sums end: they are not what is named."""
    with load(folders("two-kv-heads")) as own:
        pids = pids_of(own)
        own.engine.run(on_ranks.broken_loading, 3, "specdec.loading.assembly:check_target", "OSError")
        words = rf"on all ranks: rank 3 \(process {pids[2]}\): OSError: .*planted"
        load_ends_all(words, lambda: load(folders("two-kv-heads")), pids)
        with pytest.raises(RanksLostError, match=r"rank 3 .*planted"):
            own.generate(PROMPT, PARAMS)


@pytest.mark.long
@pytest.mark.parametrize("call", ["generate", "own_logits", "load"])
def test_the_rank_that_was_killed_is_named(four_ranks: None, folders: Callable[[str], Path], call: str) -> None:
    """Whatever ranks wait for it, and whatever for those."""
    with load(folders("two-kv-heads")) as own:
        pids = pids_of(own)
        calls: dict[str, Callable[[], Any]] = {
            "generate": lambda: own.generate([PROMPT, "zz"], PARAMS),
            "own_logits": lambda: own.own_logits(list(range(3, 20))),
            "load": lambda: load(folders("two-kv-heads")),
        }
        if call == "load":
            own.engine.run(on_ranks.broken_loading, 2, "specdec.loading.assembly:check_target", "killed")
        else:
            own.engine.run(on_ranks.killed_in_a_sum, 2, 1, 3)
        started = time.monotonic()
        with pytest.raises(ModelLoadError if call == "load" else RanksLostError, match=named(2, pids)):
            calls[call]()
        assert time.monotonic() - started < SOON
        with pytest.raises(RanksLostError, match=named(2, pids)):
            own.generate(PROMPT, PARAMS)
        assert alive(pids) == []


def named(rank: int, pids: list[int]) -> str:
    return rf"rank {rank} \(process {pids[rank - 1]}\)( is lost)?: it was killed by SIGKILL"
