"""Plans which parameters of a target are divided among ranks, and how: transformers' plan, completed; the rest stays
whole.

A plan is found on a model without weights. transformers names modules and parameters with `*` for layer numbers, and a
style for each. Of its styles those are used that divide a pair of projections (the first by its outputs, the second by
its inputs, whose partial results are summed) and stacked experts. Whatever gathers a whole result behind one projection
is left whole: on few tokens such a gather costs more than the matmul. The embedding and lm_head are read whole, because
heads share them; of lm_head every rank multiplies its own rows (`specdec.extensions.parallel.shares`).

`told` passes the plan to transformers, and `as_rank` one mesh of all ranks, while it reads the shares.

Source: transformers, src/transformers/distributed/tensor_parallel.py (styles), `_tp_plan` of its modeling files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedConfig, PreTrainedModel

from attention.hf.patches import borrowed
from specdec.errors import InvalidInputError, UnsupportedModelError
from specdec.loading.targets import AutoClass, model_class
from specdec.values import Options

_WHOLE = "replicate"
_BY_OUTPUT = "colwise"
_BY_INPUT = "rowwise"
_EXPERTS = "moe_tp_experts"
_PARTIAL = "all_reduce"
_LEFT_WHOLE = frozenset(
    {
        *("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "embedding_rowwise"),
        *("embedding_colwise", "replicated_with_grad_allreduce", "mla_kv_a_proj", _WHOLE),
    }
)
"""Styles whose modules give and take whole tensors, so that each may be left whole by itself."""
_SERVED = frozenset({_BY_OUTPUT, _BY_INPUT, _EXPERTS, _PARTIAL, "packed_colwise", "packed_rowwise", "local_params"})
_ABSORBABLE = frozenset({"DeepseekV2Attention", "DeepseekV3Attention"})
"""Attention with a latent whose forward derives the number of heads from the width of its projections' outputs."""
Styles = dict[str, str]
"""Styles of a plan by names with `*`."""
_FUSED_PAIR = {"gate_up_proj": "colwise_gather_output", "down_proj": "rowwise_split_input"}
"""transformers' styles for a feed-forward part with gate and up in one projection, behind which its plan gathers.
Divided in two halves each, it needs no gather: its forward splits its input in the middle."""
_GPT_OSS_EXPERTS = {
    "gate_up_proj": _BY_INPUT,  # [E, H, 2I], gate and up in turn: the last dimension
    "gate_up_proj_bias": _BY_INPUT,
    "down_proj": _BY_OUTPUT,  # [E, I, H]: the one before it
    "down_proj_bias": _WHOLE,
}
"""Styles by the dimension that they divide."""


@dataclass(frozen=True)
class ShardingPlan:
    """How a target is divided.

    Attributes:
        styles: transformers' names with `*` -> style, for its DistributedConfig; everything else is whole.
        kv_cut: names with `*` of attention modules whose KV heads are fewer than ranks: read whole, then cut to one.
    """

    styles: Mapping[str, str]
    kv_cut: frozenset[str]

    def style_of(self, name: str) -> str:
        """The style of a module or parameter of the model."""
        return self.styles.get(pattern_of(name), _WHOLE)


@dataclass(frozen=True)
class Share:
    """The part of a target that a rank holds.

    Attributes:
        divided: names of tensors of which each rank has a different part.
        repeated: for tensors with fewer parts than ranks: how many consecutive ranks have the same part.
            Every other tensor is whole on every rank.
        kv_copies: how many consecutive ranks have the same KV heads of an attention module, 1 if all ranks have
            different ones, N if every rank has all; several numbers if layers differ.
    """

    divided: frozenset[str]
    repeated: Mapping[str, int]
    kv_copies: frozenset[int]


def pattern_of(name: str) -> str:
    """A module's or parameter's name as plans have it.

    >>> pattern_of("model.layers.3.self_attn.q_proj"), pattern_of("model.layers.11")
    ('model.layers.*.self_attn.q_proj', 'model.layers.*')
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plan_of(model: Any, size: int) -> ShardingPlan:
    """The plan for a model (its weights are not looked at) and `size` ranks.

    Raises:
        InvalidInputError: its heads cannot be divided among so many.
        UnsupportedModelError: its own plan has styles that are not served, or nothing in it can be divided.
    """
    name = type(model).__name__
    given: Styles = model.tp_plan or {}
    decoder = model.get_decoder()
    parts = {*decoder.modules()} - {decoder}
    own = {pattern_of(n): m for n, m in model.named_modules() if m in parts}
    styles = {pattern: style for pattern, style in given.items() if style not in _LEFT_WHOLE}
    odd = sorted({*styles.values()} - _SERVED)
    if odd:
        raise UnsupportedModelError(
            f"{name} cannot be divided: transformers' plan for it has styles that are not served: {', '.join(odd)}"
        )
    styles = {pattern: style for pattern, style in styles.items() if _owner(pattern, own)}
    kv_cut = set()
    for pattern, module in own.items():
        if hasattr(module, "o_proj"):
            kv_cut |= _divide_attention(name, pattern, module, styles, size)
        elif all(
            type(getattr(module, part, None)) is nn.Linear and given.get(f"{pattern}.{part}") == style
            for part, style in _FUSED_PAIR.items()
        ):
            styles |= {f"{pattern}.gate_up_proj": "packed_colwise", f"{pattern}.down_proj": _BY_INPUT}
        elif type(module).__name__ == "GptOssExperts":
            styles |= {f"{pattern}.{part}": style for part, style in _GPT_OSS_EXPERTS.items()} | {pattern: _EXPERTS}
    _leave_uneven_whole(model, styles, size)
    if {_BY_INPUT, _EXPERTS}.isdisjoint(styles.values()):
        raise UnsupportedModelError(
            f"{name} cannot be divided: transformers has no tensor-parallel plan for it, and specdec none of its own; "
            "load it without tensor_parallel_size"
        )
    return ShardingPlan({**dict.fromkeys(given, _WHOLE), **styles}, frozenset(kv_cut))


def _owner(pattern: str, own: Mapping[str, nn.Module]) -> bool:
    """Whether a plan's name is a module of the decoder's layers, or a parameter of one."""
    return ".*." in pattern and (pattern in own or pattern.rpartition(".")[0] in own)


def _divide_attention(name: str, pattern: str, module: Any, styles: Styles, size: int) -> set[str]:
    """Give the projections of one attention module their styles; returns its pattern where KV heads are cut.

    Attention that is divided neither by transformers' plan nor by the rules here is left whole.
    """
    latent = hasattr(module, "kv_b_proj")
    queries = next((p for p in ("q_b_proj", "q_proj") if getattr(module, p, None) is not None), "")
    first = [queries, "kv_b_proj"] if latent else [queries, "k_proj", "v_proj"]
    own = {f"{pattern}.{part}": _BY_OUTPUT for part in first} | {f"{pattern}.o_proj": _BY_INPUT}
    known = own.items() <= styles.items()
    ours = type(module).__name__ in _ABSORBABLE if latent else type(module).__name__ == "GptOssAttention"
    if not (known or ours) or any(type(getattr(module, part, None)) is not nn.Linear for part in (*first, "o_proj")):
        for inside in (pattern, *(p for p in styles if p.startswith(f"{pattern}."))):
            styles.pop(inside, None)
        return set()
    styles |= own
    if "sinks" in dict(module.named_parameters(recurse=False)):
        styles[f"{pattern}.sinks"] = _BY_OUTPUT
    heads, kv_heads = _heads(module, latent)
    if heads % size:
        raise InvalidInputError(
            f"tensor_parallel_size={size}: {name} has {heads} attention heads, which {size} ranks cannot divide; "
            f"give a divisor of {heads}"
        )
    if kv_heads % size == 0:
        return set()
    if size % kv_heads:
        raise InvalidInputError(
            f"tensor_parallel_size={size}: {name} has {kv_heads} key-value heads; give a divisor or a multiple of it"
        )
    for part in ("k_proj", "v_proj"):
        del styles[f"{pattern}.{part}"]
    return {pattern}


def _heads(module: Any, latent: bool) -> tuple[int, int]:
    """(attention heads, key-value heads) of a module; with a latent every head has separate keys."""
    if latent:
        heads = module.kv_b_proj.out_features // (module.qk_nope_head_dim + module.v_head_dim)
        return heads, heads
    kv_heads = module.k_proj.out_features // module.head_dim
    return kv_heads * module.num_key_value_groups, kv_heads


def _leave_uneven_whole(model: Any, styles: Styles, size: int) -> None:
    """Leave feed-forward parts whole whose width the ranks do not divide evenly.

    A part is the modules of one parent: projections divided by output and by input belong together.
    """
    shapes = {pattern_of(name): parameter.shape for name, parameter in model.named_parameters()}
    uneven = set()
    for pattern, style in styles.items():
        shape = shapes.get(pattern, shapes.get(f"{pattern}.weight"))
        if shape is None or style not in (_BY_OUTPUT, _BY_INPUT, "packed_colwise", "packed_rowwise"):
            continue
        by_output = style in (_BY_OUTPUT, "packed_colwise") and len(shape) > 1
        width = shape[-2] if by_output else shape[-1]
        if width % (2 * size if style.startswith("packed") else size):
            uneven.add(pattern.rpartition(".")[0])
    for pattern in list(styles):
        if pattern in uneven or pattern.rpartition(".")[0] in uneven:
            del styles[pattern]


def plan_for(config: PreTrainedConfig, found: AutoClass, size: int) -> ShardingPlan:
    """The plan of a configuration's model.

    Raises:
        UnsupportedModelError: its code is not transformers' own, or see `plan_of`.
    """
    kind = model_class(config, found)
    if kind is PreTrainedModel:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: model_type={config.model_type!r} is code of its checkpoint, for which there "
            "is no plan"
        )
    with torch.device("meta"):
        return plan_of(kind(config), size)


def told(plan: ShardingPlan, size: int) -> Options:
    """The arguments of transformers' from_pretrained for a plan."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan=dict(plan.styles))}


def as_rank(device: torch.device, size: int) -> AbstractContextManager[None]:
    """While transformers loads: this rank's device, and a mesh for which no process group is made.

    transformers' own meshes have three more dimensions of one rank each, for layers and again for experts, and torch
    makes a process group for each: six unused groups a load, which stay until the last model is closed. With NCCL they
    are split off the default group, and on a GPU whose memory is full that has ended the process.
    """
    from transformers.distributed import mixin  # as of 5.23

    # Of all ranks, whose process group is the default one, and for any dimensions: no other mesh divides anything.
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))
    meshes: Any = SimpleNamespace(get_mesh=lambda dims: mesh)
    return borrowed([(mixin, "initialize_distributed_mesh", lambda distributed_config: (device, meshes))])
