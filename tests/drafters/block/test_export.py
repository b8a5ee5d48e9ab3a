"""Exported block-parallel heads: read back the same in either layout; what a layout cannot hold is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fakes import tiny_llama
from safetensors.torch import load_file

from drafters.base import FINAL_NORM, TargetFacts
from drafters.block.checkpoint import export_block, load_block, save_block
from drafters.eagle3.export import Verifier
from drafters.oracle import oracle_drafts
from specdec.cli.main import cli
from specdec.errors import InvalidInputError
from tests.block_heads import DFLASH, DFLASH2, DSPARK, block_head, write_head
from tests.drafters.block.test_speculators_package import FILES, package  # noqa: F401

VERIFIER = Verifier("someone/some-target", ("LlamaForCausalLM",))
SHARED = {"own_lm_head": False, "own_embed": False}
WINDOWS = {"num_layers": 3, "windowed_layers": (0, 2), "window": 7}
MARKOV = {**SHARED, "markov_rank": 6}
EXPORTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("z-lab", DFLASH, {}),
    "windows": ("z-lab", DFLASH, WINDOWS),
    "causal windows": ("z-lab", DFLASH, WINDOWS | {"causal_layers": (0, 2)}),
    "causal": ("z-lab", DFLASH, {"causal_layers": (0, 1), "aux_layers": (0, FINAL_NORM)}),
    "scaled": ("z-lab", DFLASH, {"embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 9.0}),
    "biases": ("z-lab", DFLASH, {"qkv_bias": True, "o_bias": True}),
    "selector": ("z-lab", DFLASH2, {"windowed_layers": (1,), "window": 3}),
    "plain, vLLM": ("speculators", DFLASH, {"aux_layers": (0, 2, 4)}),
    "causal windows, vLLM": ("speculators", DFLASH, WINDOWS | {"causal_layers": (0, 2), "draft_vocab_size": 32}),
    "windows, vLLM": ("speculators", DFLASH, WINDOWS),
    "anchor first, vLLM": ("speculators", DFLASH, {"slots": "anchor-first"}),
    "selector, vLLM": ("speculators", DFLASH2, {"windowed_layers": (1,), "window": 3, "causal_layers": (1,)}),
    "Markov head, vLLM": ("speculators", DSPARK, MARKOV),
    "gated, vLLM": ("speculators", DSPARK, MARKOV | {"markov": "gated", "confidence": "outputs and tokens"}),
    "rnn, vLLM": ("speculators", DSPARK, MARKOV | {"markov": "rnn", "slots": "fill-in", "draft_vocab_size": 32}),
    "confidence, vLLM": ("speculators", DFLASH, {"confidence": "outputs"}),
}


def facts() -> TargetFacts:
    model = tiny_llama()
    return TargetFacts(32, 64, 4, model.get_input_embeddings().weight, model.get_output_embeddings().weight)


def head_of(fields: dict[str, Any], changes: dict[str, Any]) -> Any:
    reduced = "draft_vocab_size" in changes
    return block_head(tiny_llama(), fields, **{**changes, **({"own_lm_head": True} if reduced else {})})


def exported(head: Any, folder: Path, layout: str, dtype: torch.dtype = torch.float32) -> Path:
    return export_block(head, folder, layout, facts(), VERIFIER, dtype)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_head_is_read_back(name: str, tmp_path: Path) -> None:
    layout, fields, changes = EXPORTED[name]
    head = head_of(fields, changes)
    again = load_block(exported(head, tmp_path, layout), facts(), torch.float32, "cpu")
    assert again.spec == head.spec and again.target_ids.tolist() == head.target_ids.tolist()
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in head.state_dict().items())
    generator = torch.Generator().manual_seed(2)
    ids, aux = torch.randint(64, (12,), generator=generator), torch.randn(11, head.spec.aux_size, generator=generator)
    assert oracle_drafts(again, ids, aux, 4) == oracle_drafts(head, ids, aux, 4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("speculators_config" in config) == (layout == "speculators")


@pytest.mark.parametrize("slots", ["fill-in", "anchor-first"])
def test_temperatures_are_kept_in_deepspecs_layout_and_left_out_of_speculators(slots: str, tmp_path: Path) -> None:
    head = block_head(tiny_llama(), DSPARK, **MARKOV, slots=slots, confidence="outputs and tokens")
    head.calibrate(tuple(1.5 + k for k in range(head.block_size - head.first_slot)))
    kept, left_out = save_block(head, tmp_path / "a", 4, 8), exported(head, tmp_path / "b", "speculators")
    assert load_block(kept, facts(), torch.float32, "cpu").spec.confidence_temperatures[-1] == 1.5 + 5 - head.first_slot
    again = load_block(left_out, facts(), torch.float32, "cpu")
    assert again.spec == replace(head.spec, confidence_temperatures=())
    assert "confidence_temperatures" not in (left_out / "config.json").read_text()


def test_copies_of_the_targets_tensors_are_left_out(tmp_path: Path) -> None:
    """As DeepSpec's trainer and `specdec train block` write them; rounded as the file is."""
    head = block_head(tiny_llama(), DSPARK, markov_rank=6)
    head.embed_tokens.weight.copy_(facts().embedding)
    head.lm_head.weight.copy_(facts().lm_head)
    stored = load_file(exported(head, tmp_path, "speculators", torch.bfloat16) / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & stored.keys()
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    again = load_block(tmp_path, facts(), torch.float32, "cpu")
    assert again.spec == replace(head.spec, own_embed=False, own_lm_head=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DSparkDraftModel"] and config["dtype"] == "bfloat16"
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == head.block_size == 6
    assert config["speculators_config"]["verifier"]["name_or_path"] == VERIFIER.name_or_path


UNLIKE = "it has an (embedding|lm_head) unlike its target's"
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "own tensors": ("speculators", DSPARK, {}, UNLIKE),
    "own embedding": ("z-lab", DFLASH, {"own_embed": True}, UNLIKE),
    "own lm_head": ("speculators", DFLASH, {"own_lm_head": True}, UNLIKE),
    "Markov head": ("z-lab", DSPARK, MARKOV, "it has a Markov head or slots of DSpark"),
    "slots": ("z-lab", DFLASH, {"slots": "anchor-first"}, "it has a Markov head or slots of DSpark"),
    "maps": ("z-lab", DFLASH, {"draft_vocab_size": 32}, "draft_vocab_size = 32"),
    "causal full layers": ("speculators", DFLASH, {"causal_layers": (0, 1)}, r"causal_layers = \(0, 1\)"),
    "causal mixes": ("z-lab", DFLASH, WINDOWS | {"causal_layers": (2,)}, r"causal_layers = \(2,\)"),
    "last state": ("speculators", DFLASH, {"aux_layers": (1, FINAL_NORM)}, "from 0 on, not"),
    "unnormed last state": ("z-lab", DFLASH, {"aux_layers": (1, 4)}, r"aux_layers = \(1, 4\)"),
    "scales": (
        "speculators",
        DFLASH,
        {"embedding_scale": 2.0, "logit_softcap": 3.0},
        "embedding_scale = 2.0; logit",
    ),
    "biases": ("z-lab", DFLASH, {"qkv_bias": True}, "attention_bias = True, but the checkpoint has no"),
    "biases of the MLP": ("speculators", DFLASH, {"mlp_bias": True}, "mlp_bias = False, but the checkpoint has"),
    "no norms": ("z-lab", DFLASH, {"qk_norm": False}, "use_qk_norm = True, but the checkpoint has no"),
    "convolutions alone": ("z-lab", DFLASH, {"conv_kernel_size": 2, "conv_group_size": 16}, "conv_kernel_size = 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_cannot_hold_is_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    layout, fields, changes, message = REFUSED[name]
    with pytest.raises(InvalidInputError, match=f"cannot be written in the {layout} layout: .*{message}"):
        exported(head_of(fields, changes), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["export", *words])


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_the_command(layout: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "target")
    head = block_head(tiny_llama(), DFLASH)
    words = (str(write_head(head, tmp_path / "head")), "--layout", layout, "--out", str(tmp_path / "out"))
    done = run(*words, "--target", str(tmp_path / "target"))
    assert done.exit_code == 0 and f"in the {layout} layout" in done.output, done.output
    assert load_block(tmp_path / "out", facts(), torch.float32, "cpu").spec == head.spec
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if layout == "speculators":
        assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    folder = str(write_head(block_head(tiny_llama(), DFLASH), tmp_path / "head"))
    tiny_llama().save_pretrained(tmp_path / "target")
    target = ("--target", str(tmp_path / "target"))
    for words in (("--layout", "z-lab"), ("--layout", "specforge", *target), ("--layout", "custom_generate", *target)):
        done = run(folder, *words, "--out", str(tmp_path / "out"))
        assert done.exit_code and "give --layout z-lab or speculators, and --target" in done.output
    done = run("gsm-llama-eagle3", "--layout", "z-lab", "--target", "gsm-llama", "--out", str(tmp_path / "out"))
    assert done.exit_code and "--layout z-lab is for block-parallel heads" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name in EXPORTED if EXPORTED[name][0] == "speculators"])
def test_the_package_loads_what_is_exported(
    name: str,
    package: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And drafts what the head drafts here."""
    monkeypatch.chdir(FILES)
    _, fields, changes = EXPORTED[name]
    head = head_of(fields, {**changes, **({"window": 64} if "window" in changes else {})})
    target = replace(VERIFIER, name_or_path="target")
    export_block(head, tmp_path, "speculators", facts(), target, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    kind = config["speculators_model_type"]
    loaded = package.KINDS[kind][0].from_dict(config)
    loaded.transformer_layer_config._attn_implementation = "eager"
    model = package.KINDS[kind][1](loaded).eval()
    stored = load_file(tmp_path / "model.safetensors")
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected and {n.split(".")[0] for n in missing} <= {
        *("embed_tokens", "verifier_norm", "verifier_lm_head"),
        *(() if "lm_head.weight" in stored else ("lm_head",)),
    }
    model.embed_tokens.weight.data = facts().embedding.detach().clone()
    if "lm_head.weight" not in stored:
        model.lm_head.weight.data = facts().lm_head.detach().clone()
    generator = torch.Generator().manual_seed(2)
    for length in (6, 13, 22):
        ids = torch.randint(64, (length + 1,), generator=generator)
        aux = torch.randn(length, head.spec.aux_size, generator=generator)
        drafts = head.block_size - head.first_slot
        with torch.inference_mode():
            assert package.drafted(model, ids, aux) == oracle_drafts(head, ids, aux, drafts)


@pytest.mark.parametrize("name", [name for name in EXPORTED if EXPORTED[name][0] == "z-lab"])
def test_z_labs_package_loads_what_is_exported(name: str, tmp_path: Path) -> None:
    dflash = pytest.importorskip("dflash.model", reason="dflash is not installed")
    _, fields, changes = EXPORTED[name]
    head, target = head_of(fields, changes), tiny_llama()
    exported(head, tmp_path, "z-lab")
    kind = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    model, info = getattr(dflash, kind).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    generator = torch.Generator().manual_seed(2)
    for length in (6, 13, 22):
        ids = torch.randint(64, (length + 1,), generator=generator)
        aux = torch.randn(length, head.spec.aux_size, generator=generator)
        noise = torch.full((1, model.block_size), model.mask_token_id)
        noise[0, 0] = ids[-1]
        with torch.inference_mode():
            hidden = model(
                target_hidden=aux[None],
                noise_embedding=target.get_input_embeddings()(noise) * head.spec.embedding_scale,
                position_ids=torch.arange(length + model.block_size)[None],
            )[:, 1:]
            if kind == "DFlash2DraftModel":
                theirs = model.propose(hidden, ids[None, -1], target.lm_head, 0.0)[0]
            else:
                theirs = model.compute_logits(hidden, target.lm_head).argmax(-1)
            assert oracle_drafts(head, ids, aux, head.block_size - 1) == theirs[0].tolist()
