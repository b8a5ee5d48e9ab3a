"""Checkpoints of multi-token-prediction modules: tensor names by format, FP8 blocks dequantised, experts stacked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from attention.toml_tables import read_tables
from drafters.checkpoints.layouts import Layout
from drafters.checkpoints.tensor_files import StateDict
from drafters.errors import HeadLoadError

_LAST = "last."
"""Placeholder for the number of a module's last block."""
_MIXERS = ("full_attention", "moe", "mlp")


@dataclass(frozen=True)
class MtpFormat:
    """How one format names the tensors of a module.

    Attributes:
        place: matches a tensor's name; group `k` is the module's number (absent: 0), `part` and `rest` make the name
            inside it.
        renames: names inside a module -> names in MtpHead, by prefix.
        others: what a name that none of them matches begins with in MtpHead: the first block's, or the blocks'.
        hidden_first: see MtpSpec.
        numbered: `k` is a block's number, counted through all modules, and part of the names inside one: the blocks of
            a module are 0 … B-1 there.
        blocks: B, of a module; known once the target is: see `of`.
    """

    name: str
    place: str
    renames: Mapping[str, str]
    others: str = "blocks.0."
    hidden_first: bool = False
    numbered: bool = False
    blocks: int = 1

    def of(self, config: PreTrainedConfig) -> MtpFormat:
        """The format with the number of blocks that a target's configuration names.

        Raises:
            HeadLoadError: see `mixers_of`.
        """
        if not self.numbered:
            return self
        blocks = len(mixers_of(config))
        renames = {old.replace(_LAST, f"{blocks - 1}."): new for old, new in self.renames.items()}
        return replace(self, renames=renames, blocks=blocks)

    def rename(self, rest: str) -> str:
        """A name inside a module -> the name in MtpHead."""
        for old, new in self.renames.items():
            if rest.startswith(old):
                return new + rest.removeprefix(old)
        return self.others + rest


_ENTRIES = read_tables("drafters", "mtp/formats.toml")
DEEPSEEK, MIMO, ERNIE, QWEN, NEMOTRON = (MtpFormat(name, **entry) for name, entry in _ENTRIES.items())
SPECULATORS = replace(MIMO, name="speculators", hidden_first=False)
"""Source: vllm-project/speculators: MiMo's names with the embedding first."""

FORMATS: Mapping[Layout, MtpFormat] = {
    Layout.MTP_DEEPSEEK: DEEPSEEK,
    Layout.MTP_MIMO: MIMO,
    Layout.MTP_ERNIE: ERNIE,
    Layout.MTP_QWEN: QWEN,
    Layout.MTP_NEMOTRON: NEMOTRON,
}


def mixers_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """The mixers of a module's blocks, from the configuration of a target whose layers have one each.

    Raises:
        HeadLoadError: it names no mixer, or one that a module cannot have: a recurrent mixer would need its own states.
    """
    mixers = tuple(getattr(config, "mtp_layers_block_type", None) or ())
    wrong = sorted(set(mixers) - set(_MIXERS))
    if wrong or not mixers:
        raise HeadLoadError(
            "the checkpoint's multi-token-prediction module has blocks of one mixer (mtp.layers.*.mixer); the target's "
            f"configuration says mtp_layers_block_type={list(mixers)}, allowed are {', '.join(_MIXERS)}"
        )
    return mixers


_SCALE = "_scale_inv"
_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)")
_LAYER = "model.layers.0."


def as_modules_are_named(weights: StateDict, model_type: str) -> StateDict:
    """Weights of blocks under the names of transformers' modules, where a target's checkpoints have others.

    A block is a decoder layer of the target, and named in the files as the target's layers are: Hunyuan's
    `mlp.router.gate.weight` is `mlp.gate.weight` in transformers. Renamed is by transformers' own rules for targets of
    this `model_type`, and only names that begin with "blocks.<k>.".

    Raises:
        HeadLoadError: two tensors are the same parameter.
    """
    rules = [rule for rule in get_checkpoint_conversion_mapping(model_type) or () if type(rule) is WeightRenaming]
    out = {}
    for name, tensor in weights.items():
        found = _BLOCK.fullmatch(name)
        new = name
        if found is not None:
            new = _LAYER + found[2]
            for rule in rules:
                new, _ = rule.rename_source_key(new)
            new = found[1] + new.rpartition("layers.0.")[2]
        if new in out:
            raise HeadLoadError(f"two tensors of the checkpoint are {new}")
        out[new] = tensor
    return out


def dequantise(weights: StateDict, block: tuple[int, int]) -> StateDict:
    """Multiply block-quantised weights out: `X` and `X_scale_inv` become X·scale of its block, float32; others stay.

    block: rows and columns that share one scale; the last block of a row or column may be smaller.

    Raises:
        HeadLoadError: a scale without its weight, or of another shape than the weight's blocks.
    Source: deepseek-ai/DeepSeek-V3, inference/fp8_cast_bf16.py.
    """
    plain = {name: tensor for name, tensor in weights.items() if not name.endswith(_SCALE)}
    for scale_name in weights.keys() - plain.keys():
        name = scale_name.removesuffix(_SCALE)
        scale = weights[scale_name]
        if name not in plain:
            raise HeadLoadError(f"{scale_name} has no weight {name}")
        rows, columns = plain[name].shape
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        if tuple(scale.shape) != blocks:
            raise HeadLoadError(f"{scale_name} is {list(scale.shape)}, blocks of {list(block)} need {list(blocks)}")
        wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        plain[name] = plain[name].float() * wide[:rows, :columns]
    unscaled = [name for name, tensor in plain.items() if tensor.is_floating_point() and tensor.element_size() < 2]
    if unscaled:
        raise HeadLoadError(f"fp8 weights without {_SCALE[1:]}: {', '.join(sorted(unscaled)[:4])}")
    return plain


def stack_experts(weights: StateDict) -> StateDict:
    """Join the matrices of single experts into the stacks of transformers' expert modules.

    `P.experts.j.gate_proj.weight` and `up_proj` [Im, H] of all j become `P.experts.gate_up_proj` [E, 2·Im, H],
    `down_proj` [H, Im] become `P.experts.down_proj` [E, H, Im]; of experts without a gate `up_proj` [Im, H] become
    `P.experts.up_proj` [E, Im, H]. Names of other kinds stay.

    Raises:
        HeadLoadError: an expert's matrix is missing or has another shape.
    """
    singles: dict[str, dict[tuple[int, str], Tensor]] = {}
    out = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            out[name] = tensor
        else:
            singles.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, parts in singles.items():
        experts = range(max(j for j, _ in parts) + 1)
        gated = any(kind == "gate" for _, kind in parts)
        kinds = ("gate", "up", "down") if gated else ("up", "down")
        missing = [f"{prefix}.{j}.{kind}_proj" for j in experts for kind in kinds if (j, kind) not in parts]
        if missing:
            raise HeadLoadError(f"missing: {', '.join(missing[:6])}")
        if len({(kind, tensor.shape) for (_, kind), tensor in parts.items()}) != len(kinds):
            raise HeadLoadError(f"the experts of {prefix} have matrices of different shapes")
        ups = [torch.cat([parts[j, "gate"], parts[j, "up"]]) if gated else parts[j, "up"] for j in experts]
        out |= {
            f"{prefix}.{'gate_up_proj' if gated else 'up_proj'}": torch.stack(ups),
            f"{prefix}.down_proj": torch.stack([parts[j, "down"] for j in experts]),
        }
    return out


def unstack_experts(weights: StateDict) -> StateDict:
    """The inverse of `stack_experts`: stacks become single matrices; names of other kinds stay."""
    out: StateDict = {}
    for name, tensor in weights.items():
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            for j, (gate, up) in enumerate(pair.chunk(2) for pair in tensor):
                out |= {f"{prefix}.{j}.gate_proj.weight": gate, f"{prefix}.{j}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            out |= {f"{prefix}.{j}.down_proj.weight": down for j, down in enumerate(tensor)}
        else:
            out[name] = tensor
    return out
