"""Modules of several blocks with one mixer each (Nemotron-H): the formula, and a strict reader of their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB
from torch.nn import functional as F

from drafters.errors import HeadLoadError, HeadMismatchError
from drafters.families import FAMILIES, family_of
from drafters.mtp.checkpoint import deepseek_tensors, describe_mtp, load_mtp
from drafters.mtp.convention import MtpConvention
from drafters.mtp.head import MtpHead, MtpStack
from drafters.mtp.spec import MtpSpec, block_config, mtp_target
from drafters.oracle import oracle_drafts

ROWS, EPS = 23, 1e-5
IDS = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(0))
STATES = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def case(tiny_case: Callable[..., Any]) -> Any:
    return tiny_case("nemotron_h")


def load(case: Any, folder: Path, **options: Any) -> MtpHead:
    (head,) = load_mtp(folder, mtp_target(case.model), torch.float32, "cpu", **options)
    return head


class ByHand:
    """The module from its tensors alone: plain torch, no class of transformers."""

    def __init__(self, case: Any) -> None:
        self.tensors, self.config = case.tensors, case.model.config
        self.embedding, self.lm_head = case.model.get_input_embeddings().weight, case.model.lm_head.weight

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (32,), self.tensors[f"mtp.layers.{name}.weight"], EPS)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"mtp.layers.{name}.weight"].T

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Grouped queries, no positions."""
        q, k, v = (self.linear(f"0.mixer.{n}_proj", x).unflatten(-1, (-1, 16)).transpose(0, 1) for n in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear("0.mixer.o_proj", out.transpose(0, 1).flatten(1))

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.linear(f"{name}.down_proj", self.linear(f"{name}.up_proj", x).relu() ** 2)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        """Sigmoid scores; the two best with their biases, weighted without."""
        scores = self.linear("1.mixer.gate", x).sigmoid()  # [T, E]
        bias = self.tensors["mtp.layers.1.mixer.gate.e_score_correction_bias"]
        chosen = (scores + bias).topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = weights / weights.sum(1, keepdim=True) * self.config.routed_scaling_factor
        each = torch.stack([self.mlp(f"1.mixer.experts.{j}", x) for j in range(scores.shape[1])], dim=1)  # [T, E, H]
        return (weights[..., None] * each).sum(1) + self.mlp("1.mixer.shared_experts", x)

    def __call__(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Token ids [T] and states [T, H] -> the last block's output."""
        pair = self.norm("0.enorm", self.embedding[ids]), self.norm("0.hnorm", states)
        x = self.linear("0.eh_proj", torch.cat(pair, -1))
        x = x + self.attention(self.norm("0.norm", x))
        return x + self.experts(self.norm("1.norm", x))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """What lm_head reads, and the next step is fed."""
        return self.norm("1.final_layernorm", x)

    def drafts(self, ids: torch.Tensor, states: torch.Tensor, count: int) -> list[int]:
        """After a prefix t_0 … t_L of which `states` [L, H] are known."""
        read = ids[1:]
        for _ in range(count):
            state = self.after(self(read, states))[-1:]
            read = torch.cat([read, (state @ self.lm_head.T).argmax(-1)])
            states = torch.cat([states, state])
        return read[len(ids) - 1 :].tolist()


def full_attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention over all rows [T, heads, D] at once."""
    q, k, v = (states.transpose(0, 1) for states in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


@torch.inference_mode()
def test_outputs_and_drafts_are_the_formulas(case: Any, tmp_path: Path) -> None:
    head, by_hand = load(case, case.write(tmp_path)), ByHand(case)
    x, wanted = head.forward(IDS, STATES, torch.arange(ROWS), full_attend), by_hand(IDS, STATES)
    assert float((x - wanted).abs().max()) <= 1e-4
    assert float((head.logits(x) - by_hand.after(wanted) @ by_hand.lm_head.T).abs().max()) <= 1e-4
    for length in (2, 9, ROWS):
        made = oracle_drafts(head, IDS[:length], STATES[: length - 1], 4)
        assert made == by_hand.drafts(IDS[:length], STATES[: length - 1], 4)


@torch.inference_mode()
def test_the_formula_sees_what_goes_wrong(case: Any, tmp_path: Path) -> None:
    """Blocks in the other order, and either block after the other's norm, are far off."""
    folder, wanted = case.write(tmp_path), ByHand(case)(IDS, STATES)

    def off(change: Callable[[Any], None]) -> float:
        head = load(case, folder)
        change(head)
        return float((head.forward(IDS, STATES, torch.arange(ROWS), full_attend) - wanted).abs().max())

    def swap_blocks(head: Any) -> None:
        head.blocks = torch.nn.ModuleList(reversed(head.blocks))

    def swap_norms(head: Any) -> None:
        head.blocks[0].norm, head.blocks[1].norm = head.blocks[1].norm, head.blocks[0].norm

    def final_norm_before_second(head: Any) -> None:
        head.blocks[1].norm = head.norm

    def no_experts(head: Any) -> None:
        head.blocks = head.blocks[:1]

    for change in (swap_blocks, swap_norms, final_norm_before_second, no_experts):
        assert off(change) > 0.05, change.__name__
    assert off(lambda head: None) < 1e-4


def test_one_of_the_blocks_has_keys_and_values(case: Any, tmp_path: Path) -> None:
    head = load(case, case.write(tmp_path))
    assert head.spec.mixers == ("full_attention", "moe") and len(head.blocks) == 2
    (spec,) = head.attention_specs
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim_k) == (4, 2, 16)
    assert head.rotary is None and not any(t.is_meta for t in [*head.parameters(), *head.buffers()])


@pytest.mark.parametrize("mixers", [("full_attention", "full_attention"), ("mlp", "full_attention", "moe")])
def test_any_blocks_of_one_mixer(mixers: tuple[str, ...], case: Any) -> None:
    """Every attention layer counts, wherever it stands, and its calls have its own number."""
    head = MtpHead(MtpSpec(mixers=mixers), mtp_target(case.model)).requires_grad_(False)
    assert len(head.attention_specs) == mixers.count("full_attention")
    called: list[int] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        called.append(layer)
        return full_attend(layer, query, key, value)

    assert head.forward(IDS, STATES, torch.arange(ROWS), attend).shape == (ROWS, 32)
    assert called == list(range(mixers.count("full_attention")))


def test_a_module_without_attention_is_refused(case: Any) -> None:
    with pytest.raises(HeadLoadError, match="a module has one at least"):
        MtpHead(MtpSpec(mixers=("moe", "mlp")), mtp_target(case.model))


@pytest.mark.parametrize("layer", [0, 1])
def test_every_missing_tensor_is_named(layer: int, case: Any, tmp_path: Path) -> None:
    for i, name in enumerate(n for n in case.tensors if n.startswith(f"mtp.layers.{layer}.")):
        if ".experts.0." in name or ".experts.2." in name or ".experts.3." in name:
            continue  # one expert is as another
        with pytest.raises(HeadLoadError, match="missing") as refused:
            load(case, case.write(tmp_path / str(i), {name: None}))
        assert _ours(name) in str(refused.value)


def _ours(name: str) -> str:
    """Part of a message that names a tensor: without its number, `.weight` and family."""
    kept = {"0.enorm": "enorm", "0.hnorm": "hnorm", "0.eh_proj": "eh_proj", "1.final_layernorm": "norm"}
    inside = name.removeprefix("mtp.layers.").removesuffix(".weight")
    return kept.get(inside, f"blocks.{inside}")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mtp.layers.0.mixer.o_proj.weight", (3, 5), r"shape of blocks\.0\.mixer\.o_proj\.weight: \[3, 5\]"),
        ("mtp.layers.1.enorm.weight", (32,), r"unknown: blocks\.1\.enorm\.weight"),
        ("mtp.layers.0.final_layernorm.weight", (32,), r"unknown: blocks\.0\.final_layernorm\.weight"),
        ("mtp.layers.1.mixer.q_proj.weight", (64, 32), r"unknown: blocks\.1\.mixer\.q_proj\.weight"),
        ("mtp.layers.2.norm.weight", (32,), "missing: blocks.0.mixer.k_proj.weight"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, shape: tuple[int, ...], message: str, case: Any, tmp_path: Path
) -> None:
    """Another shape; what belongs to the first or last block in another one; half a second module."""
    with pytest.raises(HeadLoadError, match=f"Nemotron-H-style module: .*{message}"):
        load_mtp(case.write(tmp_path, {name: torch.zeros(shape)}), mtp_target(case.model), torch.float32, "cpu")


@pytest.mark.parametrize("mixers", [["linear_attention", "moe"], []])
def test_blocks_that_a_module_cannot_have(
    mixers: list[str], case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = case.write(tmp_path)
    monkeypatch.setattr(case.model.config, "mtp_layers_block_type", mixers)
    with pytest.raises(HeadLoadError, match=r"mtp_layers_block_type=\[.*allowed are full_attention, moe, mlp"):
        load(case, folder)
    assert family_of(folder) is FAMILIES["mtp"]


def test_other_blocks_than_the_checkpoints(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration has the experts first: neither block is what the files hold."""
    folder = case.write(tmp_path)
    monkeypatch.setattr(case.model.config, "mtp_layers_block_type", ["moe", "full_attention"])
    with pytest.raises(HeadLoadError, match=r"missing: blocks\.0\.mixer\.experts.*unknown: blocks\.0\.mixer\.k_proj"):
        load(case, folder)


def test_these_names_beside_a_target_without_such_layers(
    case: Any, tiny_case: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(HeadLoadError, match=r"the target's configuration says mtp_layers_block_type=\[\]"):
        load(tiny_case("qwen3_next"), case.write(tmp_path))


def test_two_modules_are_a_stack(tiny_case: Callable[..., Any], tmp_path: Path) -> None:
    """Blocks are numbered through all modules: 0 and 1 are the first one's, 2 and 3 the second one's."""
    case = tiny_case("nemotron_h", modules=2)
    target = mtp_target(case.model)
    modules = load_mtp(case.write(tmp_path), target, torch.float32, "cpu")
    for k, module in enumerate(modules):
        state = module.state_dict()
        for name, theirs in {"eh_proj": "eh_proj", "blocks.0.mixer.q_proj": "mixer.q_proj"}.items():
            assert torch.equal(state[f"{name}.weight"], case.tensors[f"mtp.layers.{2 * k}.{theirs}.weight"])
        assert torch.equal(state["norm.weight"], case.tensors[f"mtp.layers.{2 * k + 1}.final_layernorm.weight"])
    fields = {field.name: field.value for field in describe_mtp(tmp_path, target).fields}
    assert (fields["num_modules"], fields["blocks"]) == (2, "full_attention, moe")


def test_modules_that_take_turns_have_one_attention_layer_each(case: Any) -> None:
    target = mtp_target(case.model)
    one, two = (MtpHead(MtpSpec(mixers=("full_attention",) * n), target) for n in (1, 2))
    assert len(MtpStack([one, one]).attention_specs) == 2
    with pytest.raises(HeadLoadError, match=r"2 multi-token-prediction modules with \[1, 2\] attention layers each"):
        MtpStack([one, two])


@pytest.mark.parametrize(("name", "kinds"), [("nemotron_h", ("up", "down")), ("qwen3_5_moe", ("gate_up", "down"))])
def test_stacked_experts_are_read_as_well(
    name: str, kinds: tuple[str, ...], tiny_case: Callable[..., Any], tmp_path: Path
) -> None:
    """As Qwen3.5 has them and transformers writes them; no two experts change places."""
    case = tiny_case(name)
    start = next(n for n in case.tensors if ".experts.0." in n).split("0.down", 1)[0]
    stacks: dict[str, torch.Tensor | None] = {}
    for kind in kinds:
        each = [[case.tensors[f"{start}{j}.{n}_proj.weight"] for n in kind.split("_")] for j in range(4)]
        stacks[f"{start}{kind}_proj"] = torch.stack([torch.cat(parts) for parts in each])
    changes = dict.fromkeys((n for n in case.tensors if n.startswith(start)), None) | stacks
    ours, plain = (load(case, case.write(tmp_path / str(i), c)) for i, c in enumerate((changes, {})))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True))


def test_it_is_described_and_not_exported(case: Any, tmp_path: Path) -> None:
    folder, target = case.write(tmp_path), mtp_target(case.model)
    fields = {field.name: field for field in describe_mtp(folder, target).fields}
    assert fields["blocks"].source == "config mtp_layers_block_type" and fields["concat"].value == "embedding_first"
    assert fields["projection"].source == "mtp.layers.0.eh_proj.weight"
    head = load(case, folder, convention=MtpConvention(concat="hidden_first", feedback="pre_norm"))
    assert head.spec.hidden_first and head.spec.feedback == "pre_norm"
    with pytest.raises(HeadLoadError, match="has one block of attention and an MLP"):
        deepseek_tensors(load(case, folder), layer=4)


def test_the_targets_own_configuration_stays(case: Any) -> None:
    config = case.model.config
    before = config.to_dict()
    block = block_config(config, MtpSpec(mixers=("moe", "full_attention")))
    assert block.layers_block_type == ["moe", "full_attention"] and block.num_hidden_layers == 2
    assert config.to_dict() == before


def test_layers_that_rotate_need_a_rotary_module(tiny_case: Callable[..., Any]) -> None:
    model = tiny_case("qwen3_next").model
    assert replace(mtp_target(model), lm_head=model.lm_head.weight).rotary is not None
    del model.model.rotary_emb
    with pytest.raises(HeadMismatchError, match="a rotary_emb where the layers take position_embeddings"):
        mtp_target(model)
