"""Every family's tensors are read under their real names, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import wrap

from drafters.errors import HeadLoadError
from drafters.families import FAMILIES, family_of
from drafters.mtp.checkpoint import deepseek_tensors, load_mtp
from drafters.mtp.formats import dequantise, stack_experts
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import mtp_target

FORMATS = ("deepseek_v3", "glm4_moe", "mimo", "ernie", "qwen3_next")
NEW_NAMES = {
    "enorm": ("enorm", "token_layernorm", "mtp_emb_norm.0", "mtp.pre_fc_norm_embedding"),
    "hnorm": ("hnorm", "hidden_layernorm", "mtp_hidden_norm.0", "mtp.pre_fc_norm_hidden"),
    "eh_proj": ("eh_proj", "input_proj", "mtp_linear_proj.0", "mtp.fc"),
    "norm": ("shared_head.norm", "final_layernorm", "mtp.norm"),
}


def load(folder: Path, case: Any, dtype: torch.dtype = torch.float32) -> MtpHead:
    (head,) = load_mtp(folder, mtp_target(case.model), dtype, "cpu")
    return head


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_arrives(name: str, shards: int, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case(name)
    head = load(case.write(tmp_path, shards=shards), case)
    state = head.state_dict()
    for ours, theirs in NEW_NAMES.items():
        found = [t for n, t in case.tensors.items() if any(f".{n}".endswith(f".{end}.weight") for end in theirs)]
        assert len(found) == (0 if name == "ernie" and ours == "norm" else 1)
        assert not found or torch.equal(state[f"{ours}.weight"], found[0])
    stored = sum(t.numel() for n, t in case.tensors.items() if "embed_tokens" not in n and "head.head" not in n)
    assert sum(t.numel() for t in state.values()) == stored
    assert not any(t.is_meta for t in [*head.parameters(), *head.buffers()])


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_and_lm_head_are_the_targets_own(name: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case(name)
    head = load(case.write(tmp_path), case)
    assert head.target_embedding.data_ptr() == case.model.get_input_embeddings().weight.data_ptr()
    assert head.target_lm_head.data_ptr() == case.model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("name", (*FORMATS, "qwen3_5", "nemotron_h"))
@pytest.mark.cases(1)
def test_any_missing_tensor_is_named(name: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case(name)
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    telling = {"ernie": "linear_proj.0.weight", "deepseek_v3": "eh_proj.weight", "glm4_moe": "eh_proj.weight"}
    optional = (*shared, *telling.values()) if name in telling else shared  # without the telling one there is no module
    needed = [n for n in case.tensors if not n.endswith(optional)]
    tried = needed[:: max(1, len(needed) // 6)]
    assert len(tried) >= 6
    for i, missing in enumerate(tried):
        folder = case.write(tmp_path / str(i), {missing: None})
        with pytest.raises(HeadLoadError, match="missing"):
            load(folder, case)


@pytest.mark.parametrize("name", FORMATS)
def test_another_shape_or_an_unknown_tensor_is_refused(
    name: str, tmp_path: Path, tiny_case: Callable[..., Any]
) -> None:
    case = tiny_case(name)
    output = next(n for n in case.tensors if n.endswith("self_attn.o_proj.weight"))
    with pytest.raises(HeadLoadError, match=r"shape of blocks\.0\.self_attn\.o_proj"):
        load(case.write(tmp_path / "a", {output: torch.zeros(3, 5)}), case)
    extra = output.replace("o_proj", "indexer")
    with pytest.raises(HeadLoadError, match=r"unknown: blocks\.0\.self_attn\.indexer"):
        load(case.write(tmp_path / "b", {extra: torch.zeros(3, 5)}), case)


def test_a_target_without_modules(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case("deepseek_v3")
    folder = case.write(tmp_path, dict.fromkeys(case.tensors))
    assert family_of(folder) is not FAMILIES["mtp"]
    with pytest.raises(HeadLoadError, match=r"no multi-token-prediction module.*leave them out"):
        load(folder, case)


def test_a_module_at_another_layer_number_is_refused(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case("deepseek_v3")
    moved = {n.replace("layers.4.", "layers.6."): t for n, t in case.tensors.items()}
    folder = case.write(tmp_path, dict.fromkeys(case.tensors) | moved)
    with pytest.raises(HeadLoadError, match=r"target of 4 layers has its DeepSeek-style modules at 4.*\[6\]"):
        load(folder, case)


@pytest.mark.parametrize("which", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_duplicate_that_differs_is_refused(which: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case("glm4_moe")
    name = next(n for n in case.tensors if n.endswith(which))
    with pytest.raises(HeadLoadError, match="differs from the target's"):
        load(case.write(tmp_path / "a", {name: case.tensors[name] + 1}), case)
    load(case.write(tmp_path / "b", {name: None}), case)


def test_nan_is_refused(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case("mimo")
    name = "model.mtp_layers.0.final_layernorm.weight"
    with pytest.raises(HeadLoadError, match=r"NaN.*norm\.weight"):
        load(case.write(tmp_path, {name: torch.full((32,), float("nan"))}), case)


@pytest.mark.slow
def test_block_fp8_is_multiplied_out(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    """DeepSeek-V3's storage: 8x16 blocks here, the last ones smaller; norms and eh_proj stay as they are."""
    case = tiny_case("deepseek_v3")
    generator = torch.Generator().manual_seed(5)
    changes: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in case.tensors.items():
        if (not name.endswith("proj.weight") and "proj_with_mqa" not in name) or "eh_proj" in name:
            continue
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // 8), -(-columns // 16), generator=generator) + 0.5
        stored = tensor.to(torch.float8_e4m3fn)
        changes |= {name: stored, f"{name}_scale_inv": scale}
        expected[name] = torch.stack(
            [torch.stack([stored[i, j].float() * scale[i // 8, j // 16] for j in range(columns)]) for i in range(rows)]
        )
    folder = case.write(tmp_path, changes, settings={"quantization_config": {"weight_block_size": [8, 16]}})
    state = load(folder, case).state_dict()
    inside = "model.layers.4."
    assert torch.equal(state["blocks.0.self_attn.kv_b_proj.weight"], expected[f"{inside}self_attn.kv_b_proj.weight"])
    gate, up = (expected[f"{inside}mlp.experts.2.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(state["blocks.0.mlp.experts.gate_up_proj"][2], torch.cat([gate, up]))
    with pytest.raises(HeadLoadError, match="without scale_inv"):
        load(case.write(tmp_path / "b", {n: t for n, t in changes.items() if not n.endswith("inv")}), case)


def test_dequantise_checks_its_blocks() -> None:
    """3x5 in blocks of 2x4 has 2x2 scales."""
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 3.0], [4.0, 5.0]])
    done = dequantise({"w": weight, "w_scale_inv": scale}, (2, 4))["w"]
    assert done.tolist() == [[2, 2, 2, 2, 3], [2, 2, 2, 2, 3], [4, 4, 4, 4, 5]]
    with pytest.raises(HeadLoadError, match=r"blocks of \[2, 2\] need \[2, 3\]"):
        dequantise({"w": weight, "w_scale_inv": scale}, (2, 2))
    with pytest.raises(HeadLoadError, match="has no weight"):
        dequantise({"w_scale_inv": scale}, (2, 2))


def test_stacked_experts() -> None:
    parts = {
        f"m.experts.{j}.{n}_proj.weight": torch.full((2, 3), float(10 * j + i))
        for j in range(3)
        for i, n in enumerate(("gate", "up"))
    }
    parts |= {f"m.experts.{j}.down_proj.weight": torch.full((3, 2), float(j)) for j in range(3)}
    done = stack_experts(parts)
    assert done["m.experts.gate_up_proj"][:, :, 0].tolist() == [[0, 0, 1, 1], [10, 10, 11, 11], [20, 20, 21, 21]]
    assert done["m.experts.down_proj"].shape == (3, 3, 2)
    del parts["m.experts.1.up_proj.weight"]
    with pytest.raises(HeadLoadError, match=r"m\.experts\.1\.up_proj"):
        stack_experts(parts)


def test_a_missing_module_is_noticed(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case("deepseek_v3")
    with pytest.raises(HeadLoadError, match=r"counts 2 multi-token-prediction modules, the files hold 1"):
        load(case.write(tmp_path, settings={"num_nextn_predict_layers": 2}), case)


@pytest.mark.slow
def test_speculators_names_are_mimos_but_the_embedding_comes_first(
    tmp_path: Path, tiny_case: Callable[..., Any]
) -> None:
    case = tiny_case("mimo")
    folder = case.write(tmp_path, settings={"speculators_model_type": "mtp"})
    assert not load(folder, case).spec.hidden_first
    assert load(case.write(tmp_path / "b"), case).spec.hidden_first
    with wrap(case.model, str(folder), num_speculative_tokens=2) as wrapped:  # as a head of its own, by its folder
        assert isinstance(wrapped.head, MtpHead) and not wrapped.head.spec.hidden_first


def test_exported_names_are_deepseeks(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    """Export is the inverse of loading, but for the duplicates of the target's tensors."""
    case = tiny_case("deepseek_v3")
    written = deepseek_tensors(load(case.write(tmp_path), case), layer=4)
    duplicates = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    assert written.keys() == case.tensors.keys() - duplicates
    assert all(torch.equal(tensor, case.tensors[name]) for name, tensor in written.items())
    other = tiny_case("ernie")
    with pytest.raises(HeadLoadError, match="DeepSeek-style"):
        deepseek_tensors(load(other.write(tmp_path / "b"), other), layer=4)
