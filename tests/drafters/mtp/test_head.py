"""A module's drafts are those of transformers' own forward, and of the formula of its family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, random_prompts
from torch.nn import functional as F
from transformers.modeling_layers import MtpModel

from attention.backends.reference import attend as dense_attend
from attention.hf.patches import attention_implementation
from drafters.base import FINAL_NORM, Head
from drafters.mtp.checkpoint import load_mtp
from drafters.mtp.convention import MtpConvention
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpSpec, block_config, mtp_target
from drafters.oracle import oracle_drafts

ROWS = 23


def load(case: Any, folder: Path, **options: Any) -> MtpHead:
    (head,) = load_mtp(case.write(folder), mtp_target(case.model), torch.float32, "cpu", **options)
    return head


def full_attend(head: MtpHead, rows: int) -> Any:
    """Causal attention over all rows at once."""
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
        return dense_attend(q, k, v, mask[None, None], head.attention_specs[layer])[0].transpose(0, 1)

    return attend


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [T], states [T, H], positions [T]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (ROWS,), generator=generator)
    return ids, torch.randn(ROWS, 32, generator=generator), torch.arange(ROWS)


def transformers_mtp(case: Any) -> MtpModel:
    """transformers' own module with the same tensors."""
    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("this release of transformers has MtpModel without forward_layer (it came after 5.17)")
    own = MtpModel(case.model, 1).eval()
    layer = own.layers[0]
    names = {n.removeprefix("model.layers.4."): t for n, t in case.tensors.items()}
    plain = {n: t for n, t in names.items() if ".experts." not in n and "head.head" not in n and "embed" not in n}
    renamed = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}
    state = {}
    for name, tensor in plain.items():
        stem = name.rpartition(".")[0]
        state[f"{renamed[stem]}.weight" if stem in renamed else f"mtp_block.{name}"] = tensor
    experts = range(4)
    parts = {k: [names[f"mlp.experts.{j}.{k}_proj.weight"] for j in experts] for k in ("gate", "up", "down")}
    pairs = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    state["mtp_block.mlp.experts.gate_up_proj"] = torch.stack(pairs)
    state["mtp_block.mlp.experts.down_proj"] = torch.stack(parts["down"])
    layer.load_state_dict(state)
    return own


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@torch.inference_mode()
def test_logits_equal_transformers_own_module(name: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    """Absorbed attention where the family has MLA; transformers runs expanded."""
    case = tiny_case(name)
    own, head = transformers_mtp(case), load(case, tmp_path)
    ids, hidden, positions = inputs()
    with attention_implementation((own.config,), "eager"):
        theirs = own.forward_layer(0, hidden[None], positions[None] + 1, None, input_ids=ids[None])[0]
    x = head.forward(ids, hidden, positions, full_attend(head, ROWS))
    assert float((head.feedback(x) - theirs).abs().max()) <= 1e-4
    assert float((head.logits(x) - own._project_to_logits(theirs)).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@torch.inference_mode()
def test_one_draft_is_transformers_own(name: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    """K = 1 after every prefix of six texts: the same draft as `MtpModel` makes."""
    case = tiny_case(name)
    own, head = transformers_mtp(case), load(case, tmp_path)
    for prompt in random_prompts([3, 5, 8, 13, 21, 34]):
        ids = torch.tensor(prompt)
        states = case.model.model(ids[None], use_cache=False).last_hidden_state
        shifted = torch.arange(1, len(ids))[None]
        with attention_implementation((own.config,), "eager"):
            drafts, _, _ = own(ids[None, 1:], states[:, :-1], None, shifted, None)
        assert oracle_drafts(head, ids, states[0, :-1], 1) == drafts[0].tolist()


def by_formula(case: Any, layer_index: int, config: Any, names: tuple[str, str, str, str | None], block: str) -> Any:
    """x, logits of a family from its tensors and the target's own layer class run by transformers' eager attention."""
    tensors, model = case.tensors, case.model
    decoder = model.get_decoder()
    norm_of = type(decoder.layers[-1].input_layernorm)

    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        module = norm_of(32, eps=model.config.rms_norm_eps)
        module.weight.data.copy_(tensors[name])
        return module(value)

    layer = type(decoder.layers[-1])(config, layer_index).eval()
    state = {n.removeprefix(block): t for n, t in tensors.items() if n.startswith(block)}
    known = layer.state_dict()
    if "mlp.experts.gate_up_proj" in known:
        parts = {k: [state.pop(f"mlp.experts.{j}.{k}_proj.weight") for j in range(4)] for k in ("gate", "up", "down")}
        state["mlp.experts.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
        state["mlp.experts.down_proj"] = torch.stack(parts["down"])
    layer.load_state_dict({n: t for n, t in state.items() if n in known})
    ids, hidden, positions = inputs()
    embedded = norm(names[0], F.embedding(ids, model.get_input_embeddings().weight))
    state_ = norm(names[1], hidden)
    order = (state_, embedded) if "mtp_layers" in names[0] else (embedded, state_)
    x = torch.cat(order, -1) @ tensors[names[2]].T
    mask = torch.full((1, 1, ROWS, ROWS), float("-inf")).triu(1)
    with attention_implementation((config,), "eager"):
        sections = hasattr(decoder.rotary_emb, "mrope_section")
        cos_sin = decoder.rotary_emb(x[None], positions.expand(3, 1, -1) if sections else positions[None])
        out = layer(x[None], position_embeddings=cos_sin, attention_mask=mask, position_ids=positions[None])
    x = (out[0] if isinstance(out, tuple) else out)[0]
    final = x if names[3] is None else norm(names[3], x)
    return x, final @ model.lm_head.weight.T


FORMULAS: dict[str, tuple[int, tuple[str, str, str, str | None], str]] = {
    "mimo": (
        0,
        (
            "model.mtp_layers.0.token_layernorm.weight",
            "model.mtp_layers.0.hidden_layernorm.weight",
            "model.mtp_layers.0.input_proj.weight",
            "model.mtp_layers.0.final_layernorm.weight",
        ),
        "model.mtp_layers.0.",
    ),
    "ernie": (
        0,  # Ernie's layer 0 is dense, as its module is
        (
            "model.mtp_emb_norm.0.weight",
            "model.mtp_hidden_norm.0.weight",
            "model.mtp_linear_proj.0.weight",
            None,
        ),
        "model.mtp_block.0.",
    ),
    "qwen3_next": (
        3,  # the first full-attention layer of the target
        ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight"),
        "mtp.layers.0.",
    ),
}
FORMULAS |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), FORMULAS["qwen3_next"])


@pytest.mark.parametrize("name", FORMULAS)
@torch.inference_mode()
def test_logits_equal_the_familys_formula(name: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case(name)
    index, names, block = FORMULAS[name]
    x, logits = by_formula(case, index, copy.deepcopy(case.model.config), names, block)
    head = load(case, tmp_path)
    ids, hidden, positions = inputs()
    ours = head.forward(ids, hidden, positions, full_attend(head, ROWS))
    assert float((ours - x).abs().max()) <= 1e-4
    assert float((head.logits(ours) - logits).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo"])
@torch.inference_mode()
def test_the_other_concat_order_is_seen(name: str, tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    """The comparisons above can fail: with the projection's halves swapped the logits are far off."""
    head = load(tiny_case(name), tmp_path)
    ids, hidden, positions = inputs()
    right = head.logits(head.forward(ids, hidden, positions, full_attend(head, ROWS)))
    head.spec = replace(head.spec, hidden_first=not head.spec.hidden_first)
    wrong = head.logits(head.forward(ids, hidden, positions, full_attend(head, ROWS)))
    assert float((right - wrong).abs().max()) > 0.5


def test_feedback_is_chosen_by_the_spec(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    case = tiny_case("glm4_moe")
    x = torch.randn(3, 32)
    post, pre = load(case, tmp_path / "a"), load(case, tmp_path / "b", convention=MtpConvention(feedback="pre_norm"))
    assert torch.equal(post.feedback(x), post.norm(x))
    assert torch.equal(pre.feedback(x), x)


def test_it_is_a_head_on_the_last_state(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    head = load(tiny_case("deepseek_v3"), tmp_path)
    assert isinstance(head, Head)
    assert head.aux_layers == (FINAL_NORM,)
    assert head.draft_vocab_size == VOCAB
    assert [(k.head_dim_k, k.head_dim_v, k.value_in_key) for k in head.attention_specs] == [(48, 40, True)]
    aux_hidden_states = torch.randn(2, 32)
    assert head.fuse(aux_hidden_states) is aux_hidden_states


def test_block_config_leaves_the_target_alone(tiny_case: Callable[..., Any]) -> None:
    config = tiny_case("qwen3_next").model.config
    before = config.to_dict()
    block = block_config(config, MtpSpec(experts=True))
    assert block.layer_types == ["full_attention"]
    assert config.to_dict() == before
