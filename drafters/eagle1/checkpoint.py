"""Load EAGLE-1 and EAGLE-2 heads: strict, every choice reported with its source."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from attention.errors import InvalidInputError
from drafters.checkpoints.config_fields import Field, HeadReport, by_presence, check_tensors, read
from drafters.checkpoints.layouts import Layout, require
from drafters.checkpoints.rope_config import resolve_rope
from drafters.checkpoints.tensor_files import CheckpointFolder
from drafters.checkpoints.unread_keys import unread_fields
from drafters.checkpoints.window_config import resolve_windows
from drafters.eagle1.head import Eagle1Head
from drafters.eagle1.spec import Eagle1Spec
from drafters.eagle3.checkpoint import TargetFacts, check_finite, ignored_field, open_head, target_vocab_size
from drafters.eagle3.layout import (
    Shapes,
    TargetSizes,
    canonical_names,
    refuse_unsupported,
    resolve_num_layers,
    resolve_sizes,
)
from drafters.eagle3.overrides import KEYS, Eagle3Overrides
from drafters.errors import HeadLoadError, HeadMismatchError

_EMBEDDING = "embed_tokens.weight"
_NO_OVERRIDES = Eagle3Overrides()
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Opened:
    """A head's folder resolved against a target, nothing loaded yet; names: parameter -> in the files."""

    folder: CheckpointFolder
    names: Mapping[str, str]
    spec: Eagle1Spec
    fields: tuple[Field, ...]

    @property
    def report(self) -> HeadReport:
        """What it was resolved to."""
        sizes = (torch.Size(self.folder.tensors[name].shape).numel() for name in self.names.values())
        return HeadReport(self.folder.path, "EAGLE-1/2, SafeAILab layout", self.fields, sum(sizes))


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
    head = _empty_head(opened.spec, target.embedding, target.lm_head)
    stored = opened.folder.load(opened.names.values())
    weights = {parameter: stored[name].to(device=device, dtype=dtype) for parameter, name in opened.names.items()}
    check_finite(weights)
    head.load_state_dict(weights, assign=True)
    head.checkpoint_report = opened.report
    log.info("%s", head.checkpoint_report)
    return head.eval().requires_grad_(False)


def describe_eagle1(path: str | Path, target: TargetFacts, overrides: Eagle3Overrides = _NO_OVERRIDES) -> HeadReport:
    """Resolve a head without loading its weights (the target's tensors may be on "meta").

    Raises:
        HeadLoadError, HeadMismatchError: as `load_eagle1`, except for what only the values show.
    """
    return _open(path, target, overrides).report


def _open(path: str | Path, target: TargetFacts, overrides: Eagle3Overrides) -> _Opened:
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
        own = {_own_name(parameter): full for parameter, full in names.items()}
        meta = torch.empty(spec.vocab_size, spec.hidden_size, device="meta")
        expected = {name: tuple(tensor.shape) for name, tensor in _empty_head(spec, meta, meta).state_dict().items()}
        check_tensors({parameter: folder.tensors[full].shape for parameter, full in own.items()}, expected)
    except HeadMismatchError as error:
        raise HeadMismatchError(f"{folder.path}: {error}") from error
    except (HeadLoadError, InvalidInputError) as error:
        raise HeadLoadError(f"{folder.path}: {error}") from error
    ignored = [*ignored_field(stray), *_unread(unread)]
    return _Opened(folder, own, spec, (*fields, *ignored, *unread_fields(folder.config, KEYS)))


def _unread(names: list[str]) -> list[Field]:
    reason = "the target's embedding is read in its place, as the reference code does"
    return [Field("ignored embedding", ", ".join(names), reason)] if names else []


def _own_name(canonical: str) -> str:
    return "layers.0." + canonical.removeprefix("midlayer.") if canonical.startswith("midlayer.") else canonical


def _resolve(
    folder: CheckpointFolder, shapes: Shapes, target: TargetSizes, overrides: Eagle3Overrides
) -> tuple[Eagle1Spec, tuple[Field, ...]]:
    config = overrides.applied(folder.config)
    refuse_unsupported(config)
    layers = resolve_num_layers(config, shapes, target)

    def present(name: str, tensor: str, *keys: str) -> Field:
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
    """The head without weights of its own, on the target's tensors (padded ones are cut, not copied)."""
    return Eagle1Head(spec, embedding[: spec.vocab_size], lm_head[: spec.vocab_size], torch.device("meta"))
