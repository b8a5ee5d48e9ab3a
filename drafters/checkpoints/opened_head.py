"""OpenedHead: a head's folder resolved to a spec, then loaded; strict: every tensor is used, and none is missing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from drafters.checkpoints.config_fields import HeadReport, ResolvedFields, Shapes, check_tensors
from drafters.checkpoints.tensor_files import CheckpointFolder, Names, filled, naming
from drafters.vocab import check_map

_MAPS = ("d2t", "t2d")
log = logging.getLogger(__name__)


class Vocabularies(Protocol):
    """The sizes of a head's vocabularies: V and Vd."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...


S = TypeVar("S", bound=Vocabularies)
H = TypeVar("H", bound=Any)
Build = Callable[[Tensor | None], H]
"""Makes a head without weights from its d2t offsets [Vd]; None where all tokens are drafted on."""


@dataclass(frozen=True)
class OpenedHead(Generic[S, H]):
    """A head's folder resolved against a target, nothing loaded yet; names: parameter -> in the files."""

    folder: CheckpointFolder
    layout: str
    names: Names
    spec: S
    fields: ResolvedFields
    build: Build[H]

    @property
    def report(self) -> HeadReport:
        """The resolved fields with their sources, and the number of parameters."""
        shapes = self.folder.shapes(self.names)
        sizes = (math.prod(shape) for parameter, shape in shapes.items() if parameter not in _MAPS)
        return HeadReport(self.folder.path, self.layout, self.fields, sum(sizes))

    def check(self) -> None:
        """Compare the files' tensors with the head's. Raises HeadLoadError, which names all that differ."""
        spec = self.spec
        module = self.build(torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
        expected: Shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        sizes = {"d2t": (spec.draft_vocab_size,), "t2d": (spec.vocab_size,)}
        needed = {"d2t"} if spec.draft_vocab_size < spec.vocab_size else set()
        maps = {name: sizes[name] for name in _MAPS if name in needed | {*self.names}}
        check_tensors(self.folder.shapes(self.names), {**expected, **maps})

    def loaded(self, dtype: torch.dtype, device: torch.device | str) -> H:
        """The head with its weights.

        Raises:
            HeadLoadError: tensors are not finite, or d2t is no map.
        """
        stored = self.folder.load(self.names.values())
        weights = {parameter: stored[full] for parameter, full in self.names.items()}
        d2t = weights.get("d2t")
        if d2t is not None:
            with naming(self.folder.path):
                check_map(d2t, self.spec.vocab_size, weights.get("t2d"))
            d2t = d2t.long()
        cast = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights.items() if name not in _MAPS}
        head = filled(self.build(d2t), cast)
        head.checkpoint_report = self.report
        log.info("%s", head.checkpoint_report)
        return head
