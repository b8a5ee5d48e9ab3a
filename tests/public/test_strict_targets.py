"""A target is its checkpoint, all of it, and stays what it was when it was wrapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, hf_greedy, random_prompts, table_head, tiny_llama
from safetensors.torch import load_file, save_file

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import ModelLoadError, SpecdecError

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 200}
(PROMPT,) = random_prompts((9,))
FEW = SamplingParams(max_new_tokens=6)


def load(target: Any, draft: Any = None, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(target, draft, tokenizer=LetterTokenizer(), **SIZES, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, changed: dict[str, torch.Tensor | None] | None = None, **settings: Any) -> Path:
    """Change, add or (None) remove tensors of a checkpoint, and settings of its config.json."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = {**load_file(weights), **(changed or {})}
    save_file({n: t for n, t in tensors.items() if t is not None}, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return folder


@pytest.mark.slow
def test_a_whole_checkpoint_loads(folder: Path) -> None:
    assert load(folder).generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6)


def test_missing_tensors_are_named(folder: Path) -> None:
    gone = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)] + ["model.norm.weight"]
    with pytest.raises(ModelLoadError, match=r"5 tensors missing.*layers\.0\.self_attn\.q_proj\.weight.* and 2 more"):
        load(rewrite(folder, dict.fromkeys(gone)))


def test_more_layers_than_the_checkpoint_has(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"(?s)9 tensors missing.*model\.layers\.4\..*num_hidden_layers"):
        load(rewrite(folder, num_hidden_layers=5))


def test_fewer_layers_than_the_checkpoint_has(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"(?s)9 tensors in the checkpoint.*model\.layers\.3\..*num_hidden_layers"):
        load(rewrite(folder, num_hidden_layers=3))


def test_a_bias_that_the_configuration_drops(folder: Path) -> None:
    bias = {"model.layers.2.self_attn.q_proj.bias": torch.ones(64)}
    with pytest.raises(ModelLoadError, match=r"1 tensor in the checkpoint.*layers\.2\.self_attn\.q_proj\.bias"):
        load(rewrite(folder, bias))


def test_another_shape_is_named(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"mlp\.up_proj\.weight: \[48, 32\] in the checkpoint, \[40, 32\]"):
        load(rewrite(folder, intermediate_size=40))


@pytest.mark.slow
def test_tied_embeddings_are_not_missing(folder: Path) -> None:
    whole = load(rewrite(folder, {"lm_head.weight": None}, tie_word_embeddings=True))
    assert len(whole.generate([PROMPT], FEW)[0].token_ids) == 6


@pytest.mark.slow
def test_tensors_that_change_nothing_are_no_error(folder: Path) -> None:
    """Scales of an 8-bit cache, a value head, an image tower."""
    extra = ("model.layers.1.self_attn.k_scale", "v_head.summary.weight", "vision_tower.layers.0.mlp.weight")
    loaded = load(rewrite(folder, {name: torch.ones(1) for name in extra}))
    assert loaded.generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6)


def other_weights() -> dict[str, torch.Tensor]:
    return tiny_llama(seed=5).state_dict()


CHANGES: dict[str, tuple[Any, str]] = {
    "recast": (lambda m: m.half(), "float32 on cpu when it was wrapped and are float16"),
    "resized": (lambda m: m.resize_token_embeddings(80), r"\(64, 64\) rows .* have \(80, 80\)"),
    "a layer replaced": (lambda m: m.model.layers.__setitem__(1, tiny_llama(seed=5).model.layers[1]), "replaced"),
    "moved": (lambda m: m.to("meta"), "float32 on cpu when it was wrapped and are float32 on meta"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_behind_our_back_is_named(name: str) -> None:
    change, message = CHANGES[name]
    model = tiny_llama()
    wrapped = load(model, table_head(model), num_speculative_tokens=3)
    change(model)
    with pytest.raises(SpecdecError, match=message):
        wrapped.generate([PROMPT], FEW)
    with pytest.raises(SpecdecError, match=message):
        wrapped.refresh()


def test_what_is_undone_is_fine_again() -> None:
    model = tiny_llama()
    wrapped = load(model)
    model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(SpecdecError, match="scaling"):
        wrapped.generate([PROMPT], FEW)
    model.model.layers[1].self_attn.scaling /= 2
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6)


@pytest.mark.slow
def test_new_values_in_place_count_at_once() -> None:
    """Greedy tokens of the new weights, with a head made for the old ones; refresh tests the model again."""
    model = tiny_llama()
    wrapped = load(model, table_head(model), num_speculative_tokens=3)
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6)
    model.load_state_dict(other_weights())
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6, seed=5)
    before = wrapped.self_test_error
    assert wrapped.refresh() == wrapped.self_test_error != before
    assert wrapped.generate([PROMPT], FEW)[0].token_ids == hf_greedy(PROMPT, 6, seed=5)


def test_no_refresh_under_running_requests() -> None:
    model = tiny_llama()
    wrapped = load(model)
    stream = wrapped.stream([PROMPT], FEW)
    next(stream)
    with pytest.raises(SpecdecError, match="requests are running"):
        wrapped.refresh()
    assert [u.completion.token_ids for u in stream if u.completion] == [hf_greedy(PROMPT, 6)]


def test_a_slice_of_the_layers_is_in_no_mode() -> None:
    """torch makes such a list anew, and new modules are in training mode; it has no dropout."""
    model = tiny_llama()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    with load(model) as wrapped:
        found = wrapped.generate(PROMPT, SamplingParams(max_new_tokens=4))[0].token_ids
    assert found == own[0, ids.shape[1] :].tolist()


def test_a_part_in_training_mode_is_not_wrapped() -> None:
    model = tiny_llama()
    model.model.layers[1].train()
    with pytest.raises(SpecdecError, match=r"training mode \(model\.layers\.1\)"):
        load(model)
