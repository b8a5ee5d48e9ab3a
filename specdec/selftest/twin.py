"""The twin: a small model of the same class with random weights, which the self-tests run in float32.

The self-test of the real weights has short rows, and in half precision it cannot distinguish a small mistake from
rounding. A twin has narrow layers of each kind, low thresholds (a sliding window of 20 tokens, …) and random float32
weights so large that every part shows in the logits; it runs on the CPU, through the torch backend, past all of its
thresholds. It cannot show mistakes of a kernel, which the self-test of the real weights covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import CacheGroup
from attention.hf.probe import Calls, expanded
from attention.runner import GroupRunner
from specdec.errors import UNNAMED_ERRORS, SpecdecError, UnsupportedModelError
from specdec.interrupts import interrupt_in
from specdec.selftest.eager_reference import (
    VERIFY_LEN,
    DummyRows,
    ReadPiece,
    errors_named,
    likely_cause,
    read_eager,
    relative_errors,
)
from specdec.selftest.shrinking import Threshold, miniature, thresholds
from specdec.wrapped.probing import TargetProbe, probe_target
from specdec.wrapped.target import Target

_LENS = np.array([300, 9, 57])
_SHORTEST = 2 * VERIFY_LEN
_PAGE_SIZE = 4
_TOLERANCE = 1e-3
"""Largest rms error of any token's logits over their rms. Right models stay below 1e-5."""
_SEEDS = (0, 1)
"""Seeds of the weights. Rounding may flip an expert of one token with one seed; a wrong model is wrong with both."""


@dataclass(frozen=True)
class TwinReport:
    """Result of the twin's test.

    Attributes:
        passed: the thresholds past which it was exact; all that a request can reach.
        unbuilt: why no twin was built, or None.
    """

    passed: tuple[Threshold, ...]
    unbuilt: str | None = None

    def __str__(self) -> str:
        if self.unbuilt is not None:
            return f"none: {self.unbuilt}"
        return "exact" + (f" past {in_words(self.passed)}" if self.passed else "")


def in_words(found: Sequence[Threshold]) -> str:
    """Thresholds as "name=value, …"."""
    return ", ".join(f"{threshold.name}={threshold.value}" for threshold in found)


def twin_test(probed: TargetProbe, max_model_len: int) -> TwinReport:
    """Build a model's twin and compare all of its logits through the paged cache with its own eager forward.

    Thresholds from `max_model_len` on, a request's longest row, stay beyond the twin's rows.

    Raises:
        UnsupportedModelError: the twin's results are wrong, or it fails only through the paged attention; the message
            names the thresholds past which this happens.
    """
    model = probed.model
    reach = thresholds(model.config, max_model_len)
    name = type(model).__name__
    try:
        error = _errors(probed, reach, max_model_len)
    except _NoTwin as reason:
        return TwinReport(reach, str(reason))
    if error is None:
        return TwinReport(reach)
    guilty = [t for t in reach if _right_without(probed, reach, [t], max_model_len)]
    if not guilty and len(reach) > 1 and _right_without(probed, reach, reach, max_model_len):
        guilty = list(reach)
    if not guilty:
        raise UnsupportedModelError(
            f"{name} comes out wrong through the paged attention{likely_cause(model)}: a small copy of it {error}"
        )
    least = min(threshold.value for threshold in guilty)
    raise UnsupportedModelError(
        f"{name} comes out wrong through the paged attention in rows longer than {in_words(guilty)}: a small copy of "
        f"it {error}, and is right without. The model applies this in a mask or in positions of its own, which the "
        f"paged attention does not see; requests of at most {least} tokens come out right: give max_model_len={least} "
        "or less"
    )


class _NoTwin(Exception):
    """A twin cannot be built; the message gives the reason."""


def _right_without(
    probed: TargetProbe, reach: Sequence[Threshold], left_out: Sequence[Threshold], max_model_len: int
) -> bool:
    """Whether the twin is right when these thresholds lie beyond its rows."""
    try:
        return _errors(probed, [t for t in reach if t not in left_out], max_model_len) is None
    except _NoTwin:
        return False


def _errors(probed: TargetProbe, low: Sequence[Threshold], max_model_len: int) -> str | None:
    """A description of the error of a twin with low thresholds `low`; None if it is right."""
    said = None
    for seed in _SEEDS:
        twin = _build(probed, [threshold.name for threshold in low], seed)
        try:
            said = _wrong(twin, max_model_len)
        except UnsupportedModelError as error:
            if interrupt_in(error) is not None:
                raise
            return f"is refused: {error}"
        if said is None:
            return None
    return said


def _build(probed: TargetProbe, low: Sequence[str], seed: int) -> TargetProbe:
    """The twin of a model, on the CPU in float32.

    Raises:
        _NoTwin: its class cannot be built so small, does not run then, or lacks a variant of attention.
    """
    reason: Exception | None = None
    for towers in (True, False):  # second, if that fails: image and sound parts keep their widths
        try:
            config = miniature(probed.model.config, low, towers)
            # Weights are drawn at construction: the user's generator is restored. devices=[]: it draws on the CPU only.
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), _quiet_transformers(), torch.no_grad():
                twin = type(probed.model)(config).float().eval()
            enlarge(twin, seed)
            with torch.inference_mode():
                read_eager(twin, [torch.arange(1, _SHORTEST)])
            small = probe_target(twin)
            if all(call.latent is None for call in probed.calls):
                small = replace(small, calls=expanded(small.calls))
        except (*UNNAMED_ERRORS, SpecdecError) as error:
            if interrupt_in(error) is not None:
                raise
            reason = error
            continue
        if not _variants(probed.calls) <= _variants(small.calls):
            raise _NoTwin("a small copy has other variants of attention")
        if not _kinds(probed) <= _kinds(small):
            raise _NoTwin("a small copy has other recurrent layers")
        return small
    raise _NoTwin(f"its class cannot be built with a small configuration ({type(reason).__name__}: {reason})")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@torch.no_grad()
def enlarge(model: torch.nn.Module, seed: int = 0, std: float = 1.5) -> None:
    """Random weights so large that every part of the model shows in its logits; matrices of rows with norm `std`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * (std / parameter.shape[-1] ** 0.5))
        else:
            parameter.add_(0.2 * noise)


@torch.inference_mode()
def _wrong(small: TargetProbe, max_model_len: int) -> str | None:
    """Read ragged rows in pieces, as the engine does, and compare; a description of the error, or None.

    Pieces: three rows at once, two of them, one alone, then a verification of each, together and alone. Of recurrent
    models the verifications alone follow those together, with some of their drafts accepted.
    """
    lens = np.maximum(np.minimum(_LENS, max_model_len), _SHORTEST)
    target = _target_of(small, lens)
    rows = DummyRows.of(target, lens)
    none = np.zeros_like(lens)
    right = read_eager(small.model, rows.ids)
    prompt = lens - VERIFY_LEN
    first = np.minimum(prompt, [24, 5, 17])
    second = np.minimum(prompt, [150, 5, 53])
    pieces = [
        ReadPiece(none, first, (0, 1, 2)),
        ReadPiece(first, second, (0, 2)),
        ReadPiece(second, prompt, (0,)),
        ReadPiece(second, prompt, (2,)),
    ]
    if target.states is None:
        pieces += [
            ReadPiece(prompt, lens, (0, 1, 2)),
            ReadPiece(prompt, prompt + 1, (1,)),
            ReadPiece(prompt, lens, (0,)),
        ]
    else:
        defers = target.states.group.rule.defers  # then the first leaves storing to the one after it
        later = none + 1 + defers
        pieces += [
            ReadPiece(prompt, lens, (0, 1, 2), replay=none, num_new=int(not defers)),
            ReadPiece(lens - 1, lens, (1,), replay=later + 1),
            ReadPiece(lens - 2, lens, (0, 2), replay=later),
        ]
    for piece in pieces:
        piece = replace(piece, rows=[row for row in piece.rows if piece.stop[row] > piece.start[row]])
        if piece.rows and (error := _piece_error(rows, piece, right, with_none=piece.start is second)) is not None:
            return error
    return None


def _piece_error(rows: DummyRows, piece: ReadPiece, right: Sequence[Tensor], with_none: bool) -> str | None:
    """A description of what is wrong with a piece's logits, or None. with_none: read it without logits, too."""
    states = rows.target.states
    own = torch.cat(piece.right_tokens(right))
    kept = None if states is None else states.copied()
    read = list(piece.rows)
    a = piece.start[read]
    b = piece.stop[read]
    tried = f"{len(read)} row(s) are read from token {a.tolist()} to {b.tolist()}"
    last = torch.from_numpy(np.cumsum(b - a) - 1)
    # All logits, the last of each row as after a prompt, and none as within one.
    for logits_indices in (torch.arange(int((b - a).sum())), last, last[:0])[: 3 if with_none else 2]:
        if states is not None and kept is not None:
            states.put_back(kept)  # the piece is read several times, from the same states
        with errors_named(rows.target.hf_model, tried):
            ours = rows.read(piece, logits_indices)
        if ours.shape != own[logits_indices].shape:
            return f"returns logits {list(ours.shape)} instead of {list(own[logits_indices].shape)} when {tried}"
        error = float(relative_errors(ours, own[logits_indices]).max()) if len(logits_indices) else 0.0
        if not error <= _TOLERANCE:
            return f"has a relative logit error of {error:.2g} in float32 (allowed: {_TOLERANCE:g}) when {tried}"
    return None


def _target_of(probed: TargetProbe, lens: np.ndarray) -> Target:
    specs = tuple(call.attention_spec for call in probed.calls)
    page_size = math.gcd(_PAGE_SIZE, *(spec.chunk_size or 0 for spec in specs))
    group = CacheGroup("twin", specs, len(lens) * -(-int(lens.max()) // page_size) + 1, page_size)
    cpu = torch.device("cpu")
    states = None
    if probed.recurrent_calls:
        from attention.recurrence.runner import StateRunner
        from attention.recurrence.states import StateGroup

        slots = StateGroup(probed.recurrence_specs, len(lens) + 1, VERIFY_LEN - 1)
        states = StateRunner(slots, torch.float32, cpu)
    return Target(probed, GroupRunner(TorchBackend(cpu), group, torch.float32, cpu), (), 0, states)


def _kinds(probed: TargetProbe) -> set[str]:
    """The kinds of recurrence that layers use."""
    return {spec.kind for spec in probed.recurrence_specs}


def _variants(calls: Calls) -> set[tuple[bool, ...]]:
    """The variants of attention that layers use: window, softcap, sinks, chunks, temperature tuning."""
    keys = [call.attention_spec for call in calls]
    used = [(key.window, key.softcap, key.has_sinks or None, key.chunk_size, key.temperature) for key in keys]
    return {tuple(value is not None for value in values) for values in used}
