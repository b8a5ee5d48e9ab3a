"""Packed linear layers of a target and its head: tokens, the one copy, new weights, and the model as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import eagle3_head, hf_greedy, tiny_llama, wrap
from torch import nn

from specdec import SpeculativeModel
from specdec.errors import InvalidInputError, ModelChangedError
from specdec.ops.packed_weight import ONEDNN, PackedWeight
from specdec.wrapped import linears
from specdec.wrapped.alterations import Alterations

BLOCKS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other blocks, from which no rows are read"
)
PROMPT = [5, 9, 2, 40, 7, 1, 33, 8, 5, 9, 2, 40, 7, 1, 33, 8, 4]


def tokens(model: Any, new: int = 24) -> list[int]:
    return list(model.generate([PROMPT], max_new_tokens=new, temperature=0)[0].token_ids)


def packed(model: nn.Module) -> list[Any]:
    return [weight for weight in model.parameters() if isinstance(weight, PackedWeight)]


def tied_llama() -> Any:
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 8])
def test_tokens_are_the_models_own_with_and_without_drafts(num_drafts: int) -> None:
    model = tiny_llama()
    draft: Any = eagle3_head(model) if num_drafts else None
    wrapped = wrap(model, draft, num_speculative_tokens=num_drafts, cpu_linears="packed", max_num_seqs=2)
    assert wrapped.describe()["linears"] == "29 of 29 by oneDNN, 29 in its layout"
    assert draft is None or len(packed(draft)) == 9
    assert tokens(wrapped) == hf_greedy(PROMPT, 24)


@BLOCKS
@pytest.mark.parametrize("num_drafts", [None, 0, 3])
def test_a_tied_weight_is_one_copy_for_embedding_lm_head_and_draft_head(num_drafts: int | None) -> None:
    """None: without a head."""
    model = tied_llama()
    right = tokens(wrap(copy.deepcopy(model)))
    head: Any = None if num_drafts is None else eagle3_head(model)
    wrapped = wrap(model, head, num_speculative_tokens=num_drafts or 0, cpu_linears="packed")
    weight: Any = model.lm_head.weight
    assert weight is model.model.embed_tokens.weight and weight.matrix.packed
    assert wrapped.describe()["linears"] == "29 of 29 by oneDNN, 29 in its layout"
    assert wrapped.describe()["parameters"] == sum(p.numel() for p in tied_llama().parameters())
    assert head is None or head.target_embedding is weight
    assert tokens(wrapped) == right and weight.matrix.packed  # nothing made it plain meanwhile


@BLOCKS
def test_a_head_reads_new_weights_and_has_the_targets_memory_after_close() -> None:
    model = tied_llama()
    head: Any = eagle3_head(model)
    wrapped = wrap(model, head, num_speculative_tokens=3, cpu_linears="packed")
    new = tied_llama()
    with torch.no_grad():
        new.lm_head.weight.mul_(-1.5)
    wrapped.update_weights(new.state_dict())
    ids = torch.tensor([3, 5])
    with torch.inference_mode():
        assert model.lm_head.weight.matrix.packed
        assert torch.equal(F.embedding(ids, head.target_embedding), new.lm_head.weight[ids])
    wrapped.close()
    assert torch.equal(head.target_embedding, new.lm_head.weight) and not head.target_embedding.requires_grad
    assert type(head.target_embedding) is torch.Tensor
    assert head.target_embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_weight_of_which_a_head_reads_a_part_stays_plain() -> None:
    model = tied_llama()
    head: Any = eagle3_head(model)
    head.target_embedding = model.model.embed_tokens.weight.detach()[:60]
    alterations = Alterations(model)
    linears.pack_linears([model, head], alterations)
    assert type(model.lm_head.weight) is nn.Parameter and type(head.target_embedding) is torch.Tensor
    alterations.undo()


def test_close_gives_the_model_back() -> None:
    model = tiny_llama()
    own, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    wrapped = wrap(model, eagle3_head(model), cpu_linears="packed")
    empty = [name for name, parameter in own.items() if not parameter.numel()]
    assert len(empty) == 29 and all("proj" in name or "lm_head" in name for name in empty)
    wrapped.close()
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()) and not packed(model)


def test_two_engines_of_one_model() -> None:
    """The second one uses what the first has laid out, and goes on when that is closed."""
    model = tiny_llama()
    own = dict(model.named_parameters())
    first, second = (wrap(model, cpu_linears="packed") for _ in range(2))
    assert tokens(first) == tokens(second) == hf_greedy(PROMPT, 24)
    first.close()
    assert tokens(second) == hf_greedy(PROMPT, 24) and not packed(model)
    second.close()
    assert all(parameter is own[name] for name, parameter in model.named_parameters())


def test_layers_with_two_parents_and_weights_with_two_layers() -> None:
    model = tiny_llama()
    blocks = model.model.layers
    blocks[1].mlp, blocks[2].self_attn.q_proj.weight = blocks[0].mlp, blocks[3].self_attn.q_proj.weight
    right = tokens(wrap(copy.deepcopy(model)))
    wrapped = wrap(model, cpu_linears="packed")
    assert wrapped.describe()["linears"] == "24 of 26 by oneDNN, 24 in its layout"
    assert tokens(wrapped) == right
    wrapped.close()
    assert not packed(model) and tokens(wrap(model)) == right


def test_a_layer_with_two_parents_is_laid_out_once() -> None:
    model = tiny_llama()
    blocks = model.model.layers
    blocks[1].mlp.down_proj = blocks[0].mlp.down_proj
    right = tokens(wrap(copy.deepcopy(model)))
    wrapped = wrap(model, cpu_linears="packed")
    assert wrapped.describe()["linears"] == "28 of 28 by oneDNN, 28 in its layout"
    assert tokens(wrapped) == right
    wrapped.close()
    assert not packed(model) and tokens(wrap(model)) == right


@BLOCKS
def test_an_lm_head_that_a_head_reads_too_is_packed_for_both() -> None:
    model = tiny_llama()
    head: Any = eagle3_head(model)
    head.register_buffer("target_lm_head", model.lm_head.weight.detach(), persistent=False)
    wrapped = wrap(model, head, cpu_linears="packed")
    assert wrapped.describe()["linears"] == "29 of 29 by oneDNN, 29 in its layout"
    assert head.target_lm_head is model.lm_head.weight
    assert tokens(wrapped) == hf_greedy(PROMPT, 24)


def test_a_load_that_fails_gives_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr("specdec.loading.assembly.check_target", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrap(model, cpu_linears="packed")
    assert not packed(model) and model.lm_head.weight.numel()


def test_new_weights_are_multiplied_by() -> None:
    """By update_weights, by load_state_dict, by .data and refresh, and by a step in place."""
    model, new = tiny_llama(), tiny_llama(seed=5).state_dict()
    wrapped = wrap(model, eagle3_head(model), cpu_linears="packed")
    old, right = hf_greedy(PROMPT, 24), hf_greedy(PROMPT, 24, seed=5)
    assert tokens(wrapped) == old != right
    wrapped.update_weights(new)
    assert tokens(wrapped) == right and wrapped.describe()["linears"] == "29 of 29 by oneDNN, 29 in its layout"
    model.load_state_dict(tiny_llama().state_dict())
    assert tokens(wrapped) == old
    for name, weight in model.named_parameters():
        weight.data = new[name].clone()
    assert wrapped.describe()["linears"] == "29 of 29 by oneDNN, 0 in its layout"
    assert tokens(wrapped) == right
    wrapped.refresh()
    assert wrapped.describe()["linears"] == "29 of 29 by oneDNN, 29 in its layout"
    assert tokens(wrapped) == right
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(0).add_(tiny_llama().state_dict()[name])
    assert tokens(wrapped) == old
    wrapped.close()
    assert all(torch.equal(value, tiny_llama().state_dict()[name]) for name, value in model.state_dict().items())


def test_a_planted_layout_of_old_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before would see."""
    model = tiny_llama()
    wrapped = wrap(model, cpu_linears="packed")
    monkeypatch.setattr(
        PackedWeight, "plain", lambda self: self.matrix.read().clone().split(self.matrix.sizes)[self.place]
    )
    wrapped.update_weights(tiny_llama(seed=5).state_dict())
    assert tokens(wrapped) != hf_greedy(PROMPT, 24, seed=5)


def test_a_state_dict_is_plain_and_can_be_saved(tmp_path: Path) -> None:
    model = tied_llama()
    right = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = wrap(model, cpu_linears="packed")
    state = wrapped.hf_model.state_dict()
    assert all(type(value) is torch.Tensor and torch.equal(value, right[name]) for name, value in state.items())
    wrapped.hf_model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(value, right[name]) for name, value in again.state_dict().items())


def test_the_models_own_forward_and_training_go_on() -> None:
    model = tiny_llama()
    ids = torch.tensor([PROMPT])
    right = model(ids).logits
    wrapped = wrap(model, cpu_linears="packed")
    found = model(ids).logits
    torch.testing.assert_close(found, right)
    found.square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    wrapped.close()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_moved_model_is_refused_and_stays() -> None:
    model = tiny_llama()
    wrapped = wrap(model, cpu_linears="packed")
    with pytest.raises(ModelChangedError, match="oneDNN"):
        model.lm_head.to(torch.float16)
    assert tokens(wrapped) == hf_greedy(PROMPT, 24)


@pytest.mark.parametrize(
    ("change", "asked", "words"),
    [
        ({}, "plain", "cpu_linears='plain'"),
        ({"loaded_before": True}, "auto", "was loaded before"),
        ({}, "auto", "less than 32 MiB"),
        ({"alone": False}, "auto", "divided among processes"),
        ({"dtype": torch.float64}, "auto", "oneDNN takes no torch.float64 on this processor"),
        ({"avx2": False}, "auto", "processors without AVX2"),
        ({"bfloat16": False, "dtype": torch.bfloat16}, "auto", "oneDNN takes no torch.bfloat16"),
        ({"onednn": False}, "auto", "oneDNN takes no torch.float32"),
    ],
)
def test_why_layers_are_plain(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], asked: str, words: str) -> None:
    model = tiny_llama().to(change.get("dtype", torch.float32))
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: change.get("avx2", True))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: change.get("onednn", True))
    monkeypatch.setattr(ONEDNN, "_is_mkldnn_bf16_supported", lambda: change.get("bfloat16", True))
    found = linears.why_plain(asked, model, change.get("loaded_before", False), change.get("alone", True))
    assert words in found
    if change.keys() & {"alone", "dtype", "bfloat16", "onednn"}:
        with pytest.raises(InvalidInputError, match=r"cpu_linears='packed': .*; give 'auto' or 'plain'"):
            linears.why_plain("packed", model, False, change.get("alone", True))


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="packed where AVX2 is")
def test_a_model_by_name_is_packed_where_it_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    for fewest, words in ((2**25, "plain: the weights take less"), (0, "29 of 29 by oneDNN")):
        monkeypatch.setattr(linears, "_FEWEST_BYTES", fewest)
        model = wrap(str(tmp_path), device="cpu", dtype="float32")
        assert model.describe()["linears"].startswith(words)
        assert tokens(model) == hf_greedy(PROMPT, 24)


def test_built_in_pairs_accept_the_same_drafts() -> None:
    texts = ["Question: Tom has 3 apples and buys 4 more. How many has he?\nAnswer:", "Question: 12 - 5 = ?\nAnswer:"]
    found = []
    for layout in ("plain", "packed"):
        model = SpeculativeModel.from_pretrained("gsm-llama", "auto", cpu_linears=layout, kv_cache_tokens=2048)
        answers = model.generate(texts, max_new_tokens=48, temperature=0)
        found.append([(list(each.token_ids), each.stats.rounds) for each in answers])
    assert found[0] == found[1]


def test_adapters_run_live_and_merge_in_place() -> None:
    peft: Any = pytest.importorskip("peft")
    made = []
    for _ in range(2):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(3)
        made.append(peft.get_peft_model(tiny_llama(), config).eval())
    right = tokens(wrap(made[0]))
    wrapped = wrap(made[1], cpu_linears="packed")
    assert tokens(wrapped) == right != hf_greedy(PROMPT, 24)
    made[1].merge_adapter()
    again = wrap(made[1])
    assert tokens(again) == right
    made[1].unmerge_adapter()
    assert tokens(wrapped) == right
