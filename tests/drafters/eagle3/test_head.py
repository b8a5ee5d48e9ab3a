"""Eagle3Head says what the published formulas say: compared with a second implementation, written row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fakes import eagle3_spec

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, Head
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec, default_aux_layers
from drafters.errors import HeadLoadError, HeadMismatchError
from drafters.rope import RopeSpec, Rotary
from drafters.vocab import most_frequent

SPEC = eagle3_spec(head_dim=6)
LLAMA3 = (
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 16),
)
VARIANTS = {
    "plain": SPEC,
    "norm_before_residual": replace(SPEC, norm_before_residual=True),
    "norms before fc": replace(SPEC, input_norm=True, fc_norm=True, fc_bias=True),
    "post-norm feedback": replace(SPEC, feedback="post_norm"),
    "qwen": replace(SPEC, qkv_bias=True, qk_norm=True, rope=RopeSpec(theta=1e6)),
    "llama3 rope": replace(SPEC, rope=RopeSpec(kind="llama3", scaling=LLAMA3)),
    "yarn rope": replace(SPEC, rope=RopeSpec(kind="yarn", max_positions=64, scaling=(("factor", 4.0),))),
    "two layers": replace(SPEC, num_layers=2),
    "last state": replace(SPEC, aux_layers=(FINAL_NORM,)),
}


def make_head(spec: Eagle3Spec, seed: int = 0) -> Eagle3Head:
    """A head with random weights everywhere, so that no norm or bias is invisible."""
    torch.manual_seed(seed)
    lm_head = None if spec.own_lm_head else torch.randn(spec.draft_vocab_size, spec.hidden_size)
    d2t = most_frequent(torch.randint(0, 9, (spec.vocab_size,)), spec.draft_vocab_size)
    head = Eagle3Head(spec, torch.randn(spec.vocab_size, spec.target_hidden_size), lm_head, d2t)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return head.eval().requires_grad_(False)


def causal_attend(head: Eagle3Head) -> Callable[..., torch.Tensor]:
    """Attention of one sequence given as a whole."""
    key = head.attention_specs[0]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x.transpose(0, 1) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, scale=key.scale, enable_gqa=True)
        return out.transpose(0, 1)

    return attend


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turn(vector: torch.Tensor, angles: torch.Tensor, factor: float) -> torch.Tensor:
    """Rotate one head's vector [D] pair by pair: (i, i + D/2) by angles[i]."""
    half, out = len(vector) // 2, vector.clone()
    for i in range(half):
        cos, sin = factor * angles[i].cos(), factor * angles[i].sin()
        out[i] = vector[i] * cos - vector[i + half] * sin
        out[i + half] = vector[i + half] * cos + vector[i] * sin
    return out


class Reference:
    """The formulas of EAGLE-3 over one sequence in float64, row by row, from a state dict."""

    def __init__(self, head: Eagle3Head) -> None:
        self.spec, self.embedding = head.spec, head.target_embedding.double()
        self.w = {name: tensor.double() for name, tensor in head.state_dict().items()}
        frequencies, self.factor = head.spec.rope.frequencies(head.spec.head_dim)
        self.frequencies = frequencies.double()

    def n(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.w[name + ".weight"], self.spec.rms_norm_eps)

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        if "fc.weight" not in self.w:
            return aux_hidden_states
        if self.spec.input_norm:
            aux_hidden_states = self.n("input_norm", aux_hidden_states)
        if self.spec.fc_norm:
            chunks = aux_hidden_states.chunk(len(self.spec.aux_layers), dim=-1)
            aux_hidden_states = torch.cat([self.n(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)], -1)
        return aux_hidden_states @ self.w["fc.weight"].T + self.w.get("fc.bias", 0.0)

    def projected(self, prefix: str, y: torch.Tensor, position: int) -> tuple[torch.Tensor, ...]:
        out = []
        for name, count in (("q", self.spec.num_heads), ("k", self.spec.num_kv_heads), ("v", self.spec.num_kv_heads)):
            x = self.w[f"{prefix}.{name}_proj.weight"] @ y + self.w.get(f"{prefix}.{name}_proj.bias", 0.0)
            x = x.view(count, self.spec.head_dim)
            if self.spec.qk_norm and name != "v":
                x = self.n(f"{prefix}.{name}_norm", x)
            if name != "v":
                x = torch.stack([turn(head, position * self.frequencies, self.factor) for head in x])
            out.append(x)
        return tuple(out)

    def attention(self, prefix: str, ys: torch.Tensor, positions: list[int]) -> torch.Tensor:
        rows = [self.projected(prefix, y, p) for y, p in zip(ys, positions, strict=True)]
        group, out = self.spec.num_heads // self.spec.num_kv_heads, []
        for t, (q, _, _) in enumerate(rows):
            heads = []
            for h in range(self.spec.num_heads):
                scores = torch.stack([q[h] @ rows[s][1][h // group] for s in range(t + 1)]) / self.spec.head_dim**0.5
                heads.append(sum(p * rows[s][2][h // group] for s, p in enumerate(scores.softmax(0))))
            out.append(self.w[f"{prefix}.o_proj.weight"] @ torch.cat(heads))
        return torch.stack(out)

    def mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.w[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def block(self, ids: torch.Tensor, hidden: torch.Tensor, positions: list[int]) -> torch.Tensor:
        normed = self.n("midlayer.hidden_norm", hidden)
        y = torch.cat((self.n("midlayer.input_layernorm", self.embedding[ids]), normed), -1)
        x = normed if self.spec.norm_before_residual else hidden
        x = x + self.attention("midlayer.self_attn", y, positions)
        x = x + self.mlp("midlayer", self.n("midlayer.post_attention_layernorm", x))
        for i in range(1, self.spec.num_layers):
            x = x + self.attention(f"layers.{i}.self_attn", self.n(f"layers.{i}.input_layernorm", x), positions)
            x = x + self.mlp(f"layers.{i}", self.n(f"layers.{i}.post_attention_layernorm", x))
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.n("norm", x) @ self.w["lm_head.weight"].T

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        return self.n("norm", x) if self.spec.feedback == "post_norm" else x


def outputs(head: Eagle3Head, start: int = 3, rows: int = 7) -> tuple[torch.Tensor, ...]:
    """fuse, block output, logits and feedback of a random sequence from the head, float64 for comparison."""
    ids, aux_hidden_states = inputs(head, rows)
    positions = torch.arange(start, start + rows)
    hidden = head.fuse(aux_hidden_states)
    x = head(ids, hidden, positions, causal_attend(head))
    return hidden, x, head.logits(x), head.feedback(x)


def inputs(head: Eagle3Head, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, head.spec.vocab_size, (rows,), generator=generator)
    return ids, torch.randn(rows, head.spec.aux_size, generator=generator)


def reference_outputs(head: Eagle3Head, start: int = 3, rows: int = 7) -> tuple[torch.Tensor, ...]:
    ids, aux_hidden_states = inputs(head, rows)
    reference = Reference(head)
    hidden = reference.fuse(aux_hidden_states.double())
    x = reference.block(ids, hidden, list(range(start, start + rows)))
    return hidden, x, reference.logits(x), reference.feedback(x)


def distance(head: Eagle3Head, other: tuple[torch.Tensor, ...]) -> float:
    return max(float((a.double() - b).abs().max()) for a, b in zip(outputs(head), other, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_head_equals_the_formulas(name: str) -> None:
    head = make_head(VARIANTS[name])
    assert distance(head, reference_outputs(head)) < 1e-4


def swap_concat(head: Eagle3Head) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.midlayer.self_attn, name).weight
        weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


def swap_norms(head: Eagle3Head) -> None:
    layer = head.midlayer
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def swap_aux_layers(head: Eagle3Head) -> None:
    head.fc.weight.copy_(head.fc.weight.roll(head.spec.target_hidden_size, dims=1))


def wrong_theta(head: Eagle3Head) -> None:
    head.rotary = Rotary(RopeSpec(theta=500000.0), head.spec.head_dim, torch.device("cpu"))


def other_residual(head: Eagle3Head) -> None:
    head.midlayer.norm_before_residual = True


@pytest.mark.parametrize("defect", [swap_concat, swap_norms, swap_aux_layers, wrong_theta, other_residual])
def test_planted_defects_are_seen(defect: Callable[[Eagle3Head], None]) -> None:
    head = make_head(SPEC)
    expected = reference_outputs(head)
    defect(head)
    assert distance(head, expected) > 2e-3


def test_other_feedback_is_seen() -> None:
    pre = make_head(SPEC)
    post = make_head(replace(SPEC, feedback="post_norm"))
    assert distance(pre, reference_outputs(post)) > 1e-2


def test_positions_matter_only_by_their_differences() -> None:
    head = make_head(SPEC)
    assert (outputs(head, start=3)[1] - outputs(head, start=900)[1]).abs().max() < 1e-3
    ids, aux_hidden_states = inputs(head, 7)
    stretched = head(ids, head.fuse(aux_hidden_states), torch.arange(0, 14, 2), causal_attend(head))
    assert (stretched - outputs(head)[1]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    head = make_head(SPEC)
    expected = outputs(head)[1]
    ids, aux_hidden_states = inputs(head, 7)
    head.to(dtype)
    x = head(ids, head.fuse(aux_hidden_states.to(dtype)), torch.arange(3, 10), causal_attend(head))
    assert x.dtype == dtype and head.rotary.frequencies.dtype == torch.float32
    assert (x.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_it_is_a_head_and_shares_the_targets_tensors() -> None:
    embedding = torch.randn(40, 16)
    lm_head = torch.randn(40, 16)
    spec = replace(SPEC, own_lm_head=False, draft_vocab_size=40)
    head = Eagle3Head(spec, embedding, lm_head)
    assert isinstance(head, Head)
    assert head.target_embedding is not None and head.target_embedding.data_ptr() == embedding.data_ptr()
    assert head.target_lm_head is not None and head.target_lm_head.data_ptr() == lm_head.data_ptr()
    assert not any("target" in name or "embed" in name or "lm_head" in name for name in head.state_dict())
    x = torch.randn(3, 16)
    assert torch.allclose(head.logits(x), head.norm(x) @ lm_head.T, atol=1e-6)


def test_parameter_names_are_the_checkpoints() -> None:
    names = set(make_head(SPEC).state_dict())
    attention = {f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"}
    mlp = {f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    norms = {f"midlayer.{x}.weight" for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    assert names == attention | mlp | norms | {"fc.weight", "norm.weight", "lm_head.weight"}


def test_draft_ids_map_to_target_ids() -> None:
    head = Eagle3Head(replace(SPEC, draft_vocab_size=4), torch.randn(40, 16), d2t=torch.tensor([1, 1, 3, 4]))
    assert head.to_target_ids(torch.tensor([[0, 1], [2, 3]])).tolist() == [[1, 2], [5, 7]]


def test_refusals() -> None:
    with pytest.raises(HeadMismatchError, match=r"40 rows of width 12.*40 rows of width 16"):
        Eagle3Head(SPEC, torch.randn(40, 12), d2t=torch.zeros(11, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="d2t"):
        Eagle3Head(SPEC, torch.randn(40, 16))
    with pytest.raises(InvalidInputError, match="own embed_tokens"):
        replace(SPEC, target_hidden_size=32)
    with pytest.raises(InvalidInputError, match="ascending"):
        replace(SPEC, aux_layers=(4, 2, 1))
    with pytest.raises(
        InvalidInputError, match=r"default aux layers: .*choose them: --aux-layers 0,1,2 of `specdec train eagle3`"
    ):
        default_aux_layers(4)
    with pytest.raises(HeadLoadError, match="high_freq_factor"):
        RopeSpec(kind="llama3", scaling=(("factor", 8.0),)).frequencies(8)
    with pytest.raises(HeadLoadError, match="longrope"):
        RopeSpec(kind="longrope").frequencies(8)
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(8) == (2, 4, 5)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_that_nobody_wants_are_left_out_and_change_nothing(name: str) -> None:
    """Their keys and values are made all the same."""
    head = make_head(VARIANTS[name])
    ids, aux_hidden_states = inputs(head, 7)
    hidden, positions, plain, keys = head.fuse(aux_hidden_states), torch.arange(7), causal_attend(head), []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys.append(len(k))
        return plain(layer, q, k, v)

    wanted = torch.tensor([6, 2])
    some = head(ids, hidden, positions, attend, rows=wanted)
    assert torch.allclose(some, head(ids, hidden, positions, plain)[wanted], atol=1e-6)
    assert keys == [7] * head.spec.num_layers
