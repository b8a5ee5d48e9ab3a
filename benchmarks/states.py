"""How many bytes of recurrent states one launch moves at least."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attention.recurrence.layer_spec import ConvSpec, RecurrenceSpec, fold_rule


def bytes_per_launch(specs: Sequence[RecurrenceSpec], drafts: int, accepted: float, dtype: torch.dtype) -> float:
    """Bytes a row over all recurrent calls of a launch that verifies `drafts` drafts.

    A state is read and written once. Launches that put storing off (`FoldRule`) write it less often: these are the
    bytes of a rule without that, which all results compare with. Of the ring beside it, the inputs of the drafts that
    the round before accepted are read, and those of this launch's drafts written. Of a convolution's ring, the width-1
    inputs before the launch are read, and those of its drafts and of its first token written.

    Qwen3-Next-80B (36 layers), K=3, two drafts accepted, bfloat16: the states alone are 2·72 MiB.

    >>> from attention.recurrence.layer_spec import DeltaSpec
    >>> layer = [ConvSpec(8192, 4), DeltaSpec(16, 32, 128, 128, False)]
    >>> [round(36 * bytes_per_launch(layer, k, a, torch.bfloat16) / 2**20, 1) for k, a in ((0, 0), (3, 2))]
    [146.2, 150.1]
    """
    return sum(_bytes(spec, drafts, accepted, dtype) for spec in specs)


def _bytes(spec: RecurrenceSpec, drafts: int, accepted: float, dtype: torch.dtype) -> float:
    if isinstance(spec, ConvSpec):
        return (spec.width - 1 + drafts + 1) * spec.channels * dtype.itemsize
    rule = fold_rule([spec], drafts)
    sizes = {name: math.prod(dims) * kind.itemsize for name, (dims, kind) in spec.shapes(rule, dtype).items()}
    state = sizes.pop("state")
    return 2 * state + (accepted + drafts) * sum(sizes.values()) / rule.ring_size
