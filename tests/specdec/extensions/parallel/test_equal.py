"""With several ranks a model says what it says in one process, in the same rounds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import device_mesh

from drafters.eagle3.checkpoint import save_eagle3
from specdec import Grammar, SamplingParams, SpeculativeModel
from specdec.extensions.parallel.engine import differing_ids
from tests.specdec.extensions.parallel import on_ranks

TEXTS = [
    "Anna has 12 apples and buys 8 more. How many apples does she have?",
    "Tom reads 7 pages a day. How many pages does he read in 5 days?",
    "A box holds 6 eggs.",
    "There are 30 birds on a tree and 11 fly away. How many are left?",
]
LETTERS = ["abcd efgh", "Hello 123", "z", "the quick brown fox jumps over it"]
SHORT_OF_PAGES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 4, "kv_cache_tokens": 96}
GREEDY = SamplingParams(max_new_tokens=7, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=7, temperature=0.8, top_p=0.95, seed=11)


def told(model: Any, prompts: Any, params: SamplingParams) -> list[tuple[list[int], str, Any]]:
    """Tokens, text and drafts of each answer."""
    answers = model.generate(prompts, replace(params, return_drafts=True))
    return [(answer.token_ids, answer.finish_reason, answer.drafts) for answer in answers]


def session(model: Any, prompts: Any) -> list[Any]:
    """Greedy, sampled, without drafts, more than the rows hold, what `mixed` asks, a stop string; then on."""
    found = [told(model, prompts, GREEDY), told(model, prompts, SAMPLED)]
    lengths = [3] * (len(prompts) - 1) + [9]  # the last request goes first, on every rank
    uneven = model.generate(prompts, [replace(SAMPLED, seed=None, n=2, max_new_tokens=most) for most in lengths])
    found.append([answer.token_ids for answer in uneven])
    found.append(told(model, prompts, replace(SAMPLED, num_speculative_tokens=0, n=2)))
    early = mixed(model, prompts)
    text = model.generate(prompts[:1], GREEDY)[0].text
    stopped = told(model, prompts, replace(GREEDY, stop=text[3:6])) if len(text) > 6 else None
    return [*found, early, stopped, told(model, prompts[::-1], replace(GREEDY, max_new_tokens=6)), model.engine_stats]


def mixed(model: Any, prompts: Any) -> list[Any]:
    """Greedy rows beside sampled ones; then a stream that is closed while another goes on."""
    longer: dict[str, Any] = {"return_drafts": True, "max_new_tokens": 18, "ignore_eos": True}
    params = [replace(SAMPLED if i % 2 else GREEDY, **longer) for i in range(len(prompts))]
    found: list[Any] = [(answer.token_ids, answer.drafts) for answer in model.generate(prompts, params)]
    stream, other = model.stream(prompts[:2], GREEDY), model.stream(prompts[2:], SAMPLED)
    found += [next(each).token_ids for each in (stream, other, stream)]
    stream.close()
    return [*found, *(update.token_ids for update in other), model.engine_stats]


def compare(
    target: Any, draft: Any, prompts: Any, size: int = 2, ask: Callable[..., list[Any]] = session, **options: Any
) -> Any:
    """The same questions to one rank and to several; returns the counters."""
    with SpeculativeModel.from_pretrained(target, draft, device="cpu", **options) as one:
        right = ask(one, prompts)
    with SpeculativeModel.from_pretrained(target, draft, device="cpu", tensor_parallel_size=size, **options) as several:
        found = ask(several, prompts)
        (spec, *_) = several.runners[0].group.attention_specs
        assert spec.num_q_heads * size == several.hf_model.config.num_attention_heads
        assert differing_ids(several.engine) == [0] * size
    assert found == right
    return found[-1]


@pytest.mark.slow
@pytest.mark.thorough
def test_llama_with_its_eagle3_head_and_preemption(two_ranks: Any) -> None:
    sizes = {"kv_cache_tokens": 112, "max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 64}
    stats = compare("gsm-llama", "auto", TEXTS, num_speculative_tokens=4, **sizes)
    assert stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["auto", pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_grammars_are_followed_on_the_first_rank(two_ranks: Any, draft: str | None) -> None:
    """The tokens of one rank. The others decide nothing; they launch what the first one does."""
    pytest.importorskip("llguidance")
    grammars = [
        Grammar.regex("[a-z]{3,9} [0-9]{1,3}"),
        None,
        Grammar.regex("(?:apples for Anna|no pens) [a-z ]{9,30}"),
        {"type": "json_object"},
    ]
    params = [SamplingParams(16, grammar=grammars[i % 4]) for i in range(6)]
    found = []
    for size in (1, 2):
        options: dict[str, Any] = {
            "device": "cpu",
            "max_num_seqs": 3,
            "max_model_len": 96,
            "tensor_parallel_size": size,
        }
        if draft:
            options["num_speculative_tokens"] = 2
        with SpeculativeModel.from_pretrained("gsm-llama", draft, **options) as model:
            found.append([c.token_ids for c in model.generate([TEXTS[i % len(TEXTS)] for i in range(6)], params)])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("ids", [pytest.param(None, marks=pytest.mark.long), range(0, 2048, 2)])
@pytest.mark.thorough
def test_deepseek_with_its_module(two_ranks: Any, ids: Any) -> None:
    """Also where that drafts on every second token. What `session` has more does not depend on who drafts."""
    sizes = {"num_speculative_tokens": 4, "max_model_len": 96, "max_num_seqs": 4}
    compare("gsm-deepseek", "mtp", TEXTS, ask=mixed, draft_vocab=ids, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        # In `make test` test_requests.py has its answers, and test_moves.py the pages of its one KV head.
        pytest.param("one-kv-head", marks=pytest.mark.long),
        pytest.param("gpt-oss", marks=pytest.mark.long),
        pytest.param("odd-vocabulary", marks=pytest.mark.long),
        pytest.param("qwen3-moe", marks=pytest.mark.long),
        pytest.param("deepseek-v3", marks=pytest.mark.long),
    ],
)
def test_tiny_models(two_ranks: Any, folders: Callable[[str], Path], name: str) -> None:
    from fakes import LetterTokenizer

    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400}
    compare(folders(name), None, LETTERS, tokenizer=LetterTokenizer(), **sizes)


@pytest.mark.slow
@pytest.mark.thorough
def test_shares_are_compiled_as_one_graph_and_give_the_models_own_logits(
    two_ranks: Any, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fakes import LetterTokenizer

    def made(**options: Any) -> None:
        raise AssertionError(f"a process group for a mesh: {options}")  # transformers' own meshes make six a load

    monkeypatch.setattr(device_mesh, "new_group", made)
    options: dict[str, Any] = {"device": "cpu", "tokenizer": LetterTokenizer(), "kv_cache_tokens": 400}
    ids = list(range(3, 20))
    with SpeculativeModel.from_pretrained(folders("one-layer"), **options) as one:
        right = one.own_logits(ids)
    with SpeculativeModel.from_pretrained(folders("one-layer"), tensor_parallel_size=2, **options) as two:
        assert torch.allclose(two.own_logits(ids), right, rtol=1e-4, atol=1e-4)
        assert two.engine.run(on_ranks.compiled_error) < 1e-4  # type: ignore[attr-defined]
        facts = two.describe()
        assert facts["tensor_parallel"] == {"size": 2, "rank": 0, "collectives": "gloo"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["one-kv-head", "gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_tiny_models_with_a_random_head(
    two_ranks: Any, folders: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    """K=4 with a head whose drafts are hardly ever right: rejections in every round, preempted rows among them."""
    from fakes import LetterTokenizer, eagle3_head
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    head = eagle3_head(AutoModelForCausalLM.from_pretrained(folders(name)), aux_layers=(0, 1, 2))
    options = {"tokenizer": LetterTokenizer(), "num_speculative_tokens": 4, "max_model_len": 80, **SHORT_OF_PAGES}
    stats = compare(folders(name), str(save_eagle3(head, tmp_path / "head")), LETTERS, **options)
    assert stats.preemptions > 0


@pytest.mark.long
def test_a_tiny_model_with_a_block_head(two_ranks: Any, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """K=6 with a head whose chain follows from the token alone, more or less; preempted rows among others."""
    from fakes import LetterTokenizer
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from tests.block_heads import DSPARK, block_head, write_head

    model = AutoModelForCausalLM.from_pretrained(folders("one-kv-head"))
    config = model.config
    sizes = {"vocab_size": config.vocab_size, "draft_vocab_size": config.vocab_size, "markov_rank": config.vocab_size}
    width = {"hidden_size": config.hidden_size, "target_hidden_size": config.hidden_size}
    head = block_head(model, DSPARK, aux_layers=(0, 1, 2), **sizes, **width)
    folder = write_head(head, tmp_path / "head", num_target_layers=config.num_hidden_layers)
    options = {"tokenizer": LetterTokenizer(), "max_model_len": 80, **SHORT_OF_PAGES}
    stats = compare(folders("one-kv-head"), str(folder), LETTERS, **options)
    assert stats.preemptions > 0


@pytest.mark.long
def test_tiny_deepseek_with_a_module(two_ranks: Any, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """K=4 with one module, whose drafts follow from the token alone, more or less."""
    from fakes import LetterTokenizer

    folder = last_layer_as_module(folders("deepseek-v3"), tmp_path / "model")
    options = {"tokenizer": LetterTokenizer(), "num_speculative_tokens": 4, "max_model_len": 80, **SHORT_OF_PAGES}
    stats = compare(folder, "mtp", LETTERS, **options)
    assert stats.preemptions > 0


def last_layer_as_module(folder: Path, to: Path) -> Path:
    """A saved DeepSeek-V3 whose last layer has become the block of a module."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    layers, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    (to / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}))
    tensors = load_file(to / "model.safetensors")
    joined = torch.cat([torch.eye(width), torch.full((width, width), 0.01)], dim=1)
    own = {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": tensors["lm_head.weight"]}
    own |= {"eh_proj": joined} | {name: torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {f"model.layers.{layers}.{name}.weight": tensor.clone() for name, tensor in own.items()}
    save_file(tensors, to / "model.safetensors")
    return to
