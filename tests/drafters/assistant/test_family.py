"""A small model from a folder or loaded: how it is found, what is refused by name, what is left of it afterwards."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, hf_greedy, hooks_of, random_prompts, tiny_llama, wrap
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import drafters.assistant.head
from attention.backends.invariant import InvariantBackend
from attention.hf.weights import model_bytes
from drafters.assistant.head import AssistantHead, paying_drafts
from drafters.checkpoints.layouts import Layout, layout_of
from drafters.errors import HeadLoadError, HeadMismatchError
from drafters.families import FAMILIES, family_of
from drafters.loops.base import LoopSize
from specdec.errors import InvalidInputError, SpecdecError, SpecdecWarning
from specdec.loading.cuda_graphs import choose_graphs
from specdec.loading.heads import load_head
from specdec.loading.sizes import num_drafts
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams
from specdec.wrapped.group import Group
from specdec.wrapped.probing import probe_target
from tests.hybrids import tiny_hybrid

PROMPT = random_prompts((9,))[0]


def write_tokenizer(folder: Path, tokens: list[str]) -> None:
    vocab = {token: index for index, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama(context=0.1).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.slow
def test_a_folder_drafts(folder: Path) -> None:
    with wrap(tiny_llama(), str(folder), num_speculative_tokens=3) as wrapped:
        done = wrapped.generate([PROMPT], SamplingParams(max_new_tokens=12))[0]
        assert done.token_ids == hf_greedy(PROMPT, 12) and done.stats.rounds
        facts = wrapped.describe()
        assert facts["head"] == "AssistantHead" and facts["aux_layers"] == []
        assert wrapped.graphs == "off: backend 'torch' has none"


def test_which_folders_are_whole_models(folder: Path, tmp_path: Path) -> None:
    assert layout_of(folder) is Layout.CAUSAL_LM and family_of(folder) is FAMILIES["assistant"]
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "gpt2")
    assert layout_of(tmp_path / "gpt2") is Layout.CAUSAL_LM


def test_what_its_files_say(folder: Path) -> None:
    report = family_of(folder).code().describe_head(str(folder), {})
    assert report.layout == "a causal language model"
    assert {field.name: field.value for field in report.fields}["num_hidden_layers"] == 4
    assert report.num_parameters == sum(p.numel() for p in tiny_llama().parameters())


@pytest.mark.slow
def test_a_loaded_model_is_as_it_was_afterwards() -> None:
    model = tiny_llama(context=0.1)
    ids = torch.tensor([PROMPT])
    before, hooks = model(ids).logits, hooks_of(model)
    with wrap(tiny_llama(), model, num_speculative_tokens=3) as wrapped:
        wrapped.generate([PROMPT], SamplingParams(max_new_tokens=8))
        assert torch.equal(model(ids).logits, before), "the user's own forward meanwhile"
    del wrapped
    assert hooks_of(model) == hooks and torch.equal(model(ids).logits, before)
    assert not any(hasattr(module, "_specdec_layer") for module in model.modules())


def quantised() -> Any:
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def with_rope(kind: str) -> Any:
    model = tiny_llama()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[SpecdecError], str]] = {
    "a vocabulary of another size": (
        lambda: tiny_llama(32),
        HeadMismatchError,
        "a vocabulary of 32 tokens, the target 64, and no tokenizer.json .*: draft models of other .*; give a smaller",
    ),
    "quantised": (quantised, HeadLoadError, "is quantised.*give its checkpoint in bfloat16 or float16"),
    "a changing rotary embedding": (lambda: with_rope("dynamic"), HeadLoadError, "rope_type='dynamic'.*longest row"),
    "another dtype": (lambda: tiny_llama().bfloat16(), HeadMismatchError, "is bfloat16 on cpu, the target float32"),
    "no logits": (lambda: tiny_llama().model, HeadLoadError, "LlamaModel cannot draft: .*AttributeError"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_draft_are_refused_by_name(kind: str) -> None:
    make, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        load_head(make(), None, probe_target(tiny_llama()), LoadOptions(), None)


@pytest.mark.slow
def test_recurrent_models_are_refused() -> None:
    with pytest.raises(HeadLoadError, match="has recurrent layers; give a model of attention layers alone"):
        load_head(tiny_hybrid("qwen3_next"), None, probe_target(tiny_llama()), LoadOptions(), None)


def test_the_target_itself_is_refused() -> None:
    target = tiny_llama()
    with pytest.raises(HeadLoadError, match="LlamaForCausalLM is the target itself"):
        load_head(target, None, probe_target(target), LoadOptions(), None)


def test_processes_that_divide_a_target_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "size", 2, raising=False)
    group = Group()
    with pytest.raises(InvalidInputError, match=r"a small draft model drafts .* in one process, not in 2; give a head"):
        load_head(tiny_llama(context=0.1), None, probe_target(tiny_llama()), LoadOptions(), None, group)


def test_rounds_run_from_graphs_where_the_backend_has_them() -> None:
    loop = AssistantHead(tiny_llama()).draft_loop(LoopSize())
    assert choose_graphs(InvariantBackend(), loop, True).required


def test_options_of_other_families_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"mtp_concat.*this is a small draft model; leave it out"):
        options = LoadOptions(mtp_concat="hidden_first")
        load_head(tiny_llama(context=0.1), None, probe_target(tiny_llama()), options, None)


@pytest.mark.parametrize("shared", [True, False])
def test_tokenizers_are_compared_where_both_lie_in_files(folder: Path, tmp_path: Path, shared: bool) -> None:
    tiny_llama().save_pretrained(tmp_path / "target")
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    write_tokenizer(tmp_path / "target", ["a", "b", "c"])
    write_tokenizer(folder, ["a", "b", "c", "<more>"] if shared else ["a", "c", "b"])
    if shared:
        assert load_head(str(folder), None, probe_target(target), LoadOptions(), None)
        return
    with pytest.raises(HeadMismatchError, match=re.escape("token 'c' is 1 there, 2 in the target's (2 tokens differ)")):
        load_head(str(folder), None, probe_target(target), LoadOptions(), None)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "target"), [(VOCAB, VOCAB + 8), (VOCAB + 8, VOCAB)])
def test_vocabularies_that_differ_by_padding(tmp_path: Path, own: int, target: int) -> None:
    """As in Qwen's sizes: the same tokenizer, embeddings padded differently. Padding is read, and never drafted."""
    models = {"small": tiny_llama(own, context=0.1), "target": tiny_llama(target)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        write_tokenizer(tmp_path / name, [f"t{i}" for i in range(VOCAB - 3)])
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    with wrap(loaded, str(tmp_path / "small"), num_speculative_tokens=3) as wrapped:
        rows = wrapped.head.model.lm_head.weight
        rows[VOCAB:] = 100 * rows[: len(rows) - VOCAB]  # were padding drafted, it would be
        prompt = [*PROMPT, min(own, target) - 1, target - 1]
        params = [SamplingParams(max_new_tokens=12, temperature=t, seed=1, return_drafts=True) for t in (0.0, 1.0)]
        greedy, sampled = wrapped.generate([prompt] * 2, params)
        assert greedy.token_ids == hf_greedy(prompt, 12, target)
        assert all(token < VOCAB for c in (greedy, sampled) for drafts in c.drafts for token in drafts)
    write_tokenizer(tmp_path / "small", [f"t{i}" for i in range(VOCAB - 2)])
    with pytest.raises(HeadMismatchError, match=f"a vocabulary of {own} tokens, the target {target}, and no tokenizer"):
        load_head(str(tmp_path / "small"), None, probe_target(loaded), LoadOptions(), None)


def test_how_many_drafts_pay() -> None:
    assert doctest.testmod(drafters.assistant.head).attempted == 1
    assert [paying_drafts(cost)[1] > 1 for cost in (0.1, 0.69, 0.71, 1.0)] == [True, True, False, False]
    target = tiny_llama()
    half = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1}))
    share = model_bytes(half) / model_bytes(target)
    assert num_drafts(None, AssistantHead(half), False, target) == paying_drafts(share)[0]
    assert num_drafts(7, AssistantHead(half), False, target) == 7


def test_a_draft_model_as_large_as_the_target_is_said_to_cost_time() -> None:
    with pytest.warns(SpecdecWarning, match=r"too large for the target: 0\.85 times the tokens a second"):
        assert num_drafts(None, AssistantHead(tiny_llama(context=0.1)), False, tiny_llama()) == 1


def test_a_damaged_folder_is_one_message(folder: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**tiny_llama().config.to_dict(), "num_hidden_layers": 1}))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadLoadError, match=r"the draft model's checkpoint lacks model\.layers\.1"):
        load_head(str(folder), None, probe_target(tiny_llama()), LoadOptions(), None)
