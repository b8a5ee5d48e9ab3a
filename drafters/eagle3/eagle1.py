"""EAGLE-1 and EAGLE-2 heads: specification, module, strict loader."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, Attend, TargetFacts
from drafters.checkpoints.config_fields import (
    HeadReport,
    ResolvedField,
    by_presence,
    check_tensors,
    read,
    resolve_rope,
    resolve_windows,
    unread_fields,
)
from drafters.checkpoints.layouts import Layout, require
from drafters.checkpoints.tensor_files import CheckpointFolder, filled
from drafters.eagle3.checkpoint import ResolvedCheckpoint, ignored_field, open_head, target_vocab_size
from drafters.eagle3.head import PlainLayer, check_shape
from drafters.eagle3.layout import (
    Shapes,
    TargetSizes,
    canonical_names,
    refuse_unsupported,
    resolve_num_layers,
    resolve_sizes,
)
from drafters.eagle3.overrides import KEYS, Eagle3Overrides
from drafters.eagle3.spec import LayerSpec
from drafters.errors import HeadLoadError, HeadMismatchError
from drafters.loops.base import LoopSize
from drafters.loops.chain import ChainLoop
from drafters.loops.chain_passes import EaglePasses
from drafters.rope import Rotary


@dataclass(frozen=True, kw_only=True)
class Eagle1Spec(LayerSpec):
    """One EAGLE-1 (or EAGLE-2, which has the same weights) head, as its own checkpoint defines it. H is the target's.

    Attributes:
        first_norm: the first layer has a norm before its attention (the published heads have none).
    """

    rms_norm_eps: float = 1e-6
    fc_bias: bool = True
    first_norm: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes that contradict each other."""
        self.check_layers("EAGLE-1")


class Eagle1Head(nn.Module):
    """An EAGLE-1 head; satisfies `drafters.base.Head` and `drafters.checkpoints.config_fields.Reported`.

    It predicts the target's next state after the final norm, so the target's lm_head reads its output as it is. The
    target's embedding and lm_head are shared tensors: they are no parameters and do not appear in the state dict.

    Source: SafeAILab/EAGLE, eagle/model/cnets1.py.
    """

    target_embedding: torch.Tensor
    target_lm_head: torch.Tensor

    def __init__(
        self,
        spec: Eagle1Spec,
        target_embedding: torch.Tensor,
        target_lm_head: torch.Tensor,
        device: torch.device | None = None,
    ) -> None:
        """Build a head with fresh float32 weights.

        Args:
            target_embedding, target_lm_head: [V, H].
            device: for the fresh weights; default: the device of `target_embedding`. "meta" allocates none.

        Raises:
            HeadMismatchError: the target's tensors do not fit the head.
        """
        super().__init__()
        self.spec = spec
        self.aux_layers: tuple[int, ...] = (FINAL_NORM,)
        self.hidden_size = spec.hidden_size
        self.draft_vocab_size = spec.vocab_size
        self.attention_specs = spec.attention_specs
        self.checkpoint_report: HeadReport | None = None
        check_shape("embedding", target_embedding, spec.vocab_size, spec.hidden_size)
        check_shape("lm_head", target_lm_head, spec.vocab_size, spec.hidden_size)
        # Not persistent: they are the target's, so they are no part of the head's checkpoint.
        self.register_buffer("target_embedding", target_embedding.detach(), persistent=False)
        self.register_buffer("target_lm_head", target_lm_head.detach(), persistent=False)
        self.rotary = Rotary(spec.rope, spec.head_dim, target_embedding.device)
        with device or target_embedding.device:
            self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=spec.fc_bias)
            norms = (spec.first_norm, *(True for _ in range(1, spec.num_layers)))
            self.layers = nn.ModuleList(PlainLayer(spec, index, norm) for index, norm in enumerate(norms))

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H], the target's states after its final norm, as they are."""
        return aux_hidden_states

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass over T rows; see `drafters.eagle3.head.Eagle3Head.forward`."""
        embedded = F.embedding(token_ids, self.target_embedding).to(hidden.dtype)  # [T, H]
        x = self.fc(torch.cat((embedded, hidden), dim=-1))  # embedding first
        cos_sin = self.rotary(positions)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x, cos_sin, attend, rows if index == last else None)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] block outputs -> [R, V] draft logits."""
        return F.linear(x.to(self.target_lm_head.dtype), self.target_lm_head)

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] block outputs -> [R, H] hidden state of the next draft step: the same."""
        return x

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft-vocabulary ids (any shape, int64): the target's."""
        return draft_ids

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        """A chain."""
        return ChainLoop(self, partial(EaglePasses, self))


_EMBEDDING = "embed_tokens.weight"
_NO_OVERRIDES = Eagle3Overrides()
log = logging.getLogger(__name__)


def load_eagle1(
    path: str | Path,
    target: TargetFacts,
    dtype: torch.dtype,
    device: torch.device | str,
    overrides: Eagle3Overrides = _NO_OVERRIDES,
) -> Eagle1Head:
    """Load an EAGLE-1 or EAGLE-2 head, ready for inference.

    A stored embedding is not read: the reference code, too, puts the target's in its place.

    Args, Raises: as `drafters.eagle3.checkpoint.load_eagle3`; of the overrides, keys of config.json alone.
    """
    opened = _open(path, target, overrides)
    cast = {parameter: tensor.to(device=device, dtype=dtype) for parameter, tensor in opened.load().items()}
    head = filled(_empty_head(opened.spec, target.embedding, target.lm_head), cast)
    head.checkpoint_report = opened.report
    log.info("%s", head.checkpoint_report)
    return head


def describe_eagle1(path: str | Path, target: TargetFacts, overrides: Eagle3Overrides = _NO_OVERRIDES) -> HeadReport:
    """Resolve a head without loading its weights (the target's tensors may be on "meta").

    Raises:
        HeadLoadError, HeadMismatchError: as `load_eagle1`, except for what only the values show.
    """
    return _open(path, target, overrides).report


def _open(path: str | Path, target: TargetFacts, overrides: Eagle3Overrides) -> ResolvedCheckpoint[Eagle1Spec]:
    folder, layout, short, stray = open_head(path)
    require(layout, Layout.EAGLE1, folder.config, short)
    if overrides.aux_layers is not None or overrides.feedback is not None:
        raise HeadLoadError(
            f"{folder.path}: aux_layers and feedback cannot be chosen for an EAGLE-1 head: it reads the target's last "
            "state and is fed its own output"
        )
    names = canonical_names([name for name in folder.tensors if name not in stray])
    unread = [names.pop(_EMBEDDING)] if _EMBEDDING in names else []
    shapes = {parameter: folder.tensors[full].shape for parameter, full in names.items()}
    try:
        sizes = TargetSizes(target.hidden_size, target_vocab_size(folder, target, overrides), target.num_layers)
        spec, fields = _resolve(folder, shapes, sizes, overrides)
        own = {re.sub(r"^midlayer\.", "layers.0.", parameter): full for parameter, full in names.items()}
        meta = torch.empty(spec.vocab_size, spec.hidden_size, device="meta")
        expected = {name: tuple(tensor.shape) for name, tensor in _empty_head(spec, meta, meta).state_dict().items()}
        check_tensors({parameter: folder.tensors[full].shape for parameter, full in own.items()}, expected)
    except HeadMismatchError as error:
        raise HeadMismatchError(f"{folder.path}: {error}") from error
    except (HeadLoadError, InvalidInputError) as error:
        raise HeadLoadError(f"{folder.path}: {error}") from error
    ignored = list(ignored_field(stray))
    if unread:
        reason = "the target's embedding is read in its place, as the reference code does"
        ignored.append(ResolvedField("ignored embedding", ", ".join(unread), reason))
    fields += (*ignored, *unread_fields(folder.config, KEYS))
    return ResolvedCheckpoint(folder, "EAGLE-1/2, SafeAILab layout", own, spec, fields)


def _resolve(
    folder: CheckpointFolder, shapes: Shapes, target: TargetSizes, overrides: Eagle3Overrides
) -> tuple[Eagle1Spec, tuple[ResolvedField, ...]]:
    config = overrides.applied(folder.config)
    refuse_unsupported(config)
    layers = resolve_num_layers(config, shapes, target)

    def present(name: str, tensor: str, *keys: str) -> ResolvedField:
        return by_presence(config, name, tensor, tensor in shapes, *keys)

    sizes = [field for field in resolve_sizes(config, target) if field.name != "target_hidden_size"]
    attention = "midlayer.self_attn."
    fields = (
        *sizes,
        layers,
        read(config, "rms_norm_eps", float, default=1e-6),
        resolve_rope(config),
        present("fc_bias", "fc.bias", "bias"),
        present("first_norm", "midlayer.input_layernorm.weight"),
        present("qkv_bias", attention + "q_proj.bias", "attention_bias", "qkv_bias"),
        present("o_bias", attention + "o_proj.bias"),
        present("mlp_bias", "midlayer.mlp.gate_proj.bias", "mlp_bias"),
        present("qk_norm", attention + "q_norm.weight", "use_qk_norm"),
        *resolve_windows(config, layers.value),
    )
    return Eagle1Spec(**{field.name: field.value for field in fields}), overrides.marked(fields)


def _empty_head(spec: Eagle1Spec, embedding: torch.Tensor, lm_head: torch.Tensor) -> Eagle1Head:
    """The head before its weights are loaded, sharing the target's tensors (padded tensors are cut, not copied)."""
    return Eagle1Head(spec, embedding[: spec.vocab_size], lm_head[: spec.vocab_size], torch.device("meta"))
