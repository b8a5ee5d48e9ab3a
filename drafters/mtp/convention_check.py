"""Whether a multi-token-prediction module is run with the input convention it was trained with.

No checkpoint records the order of the projection's two halves, nor what a module was fed back. A wrong choice raises
nothing and only costs acceptance. So the module runs over a short text with the chosen input convention and with the
other one, and both are scored on the tokens that the target itself would generate next.

Only a clear difference counts. Random weights have no convention; and where the final norm's weights are all alike,
both ways of feeding back are the same function (the module's own norm removes the length), so neither is wrong.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from attention.spec import AttentionSpec
from drafters.base import Head
from drafters.errors import HeadLoadError
from drafters.mtp.spec import MtpSpec
from drafters.unroll import TttAttend, shift_left, unroll

_MARGIN, _SIGMAS = 0.1, 4.0
"""The other convention must be better by this many nats per token, and by this many standard errors."""
_LEAST = 16
"""Fewest tokens of a text for a comparison."""
_KNOWS = 0.7
"""A convention whose surprise is more than this share of log V nats per token has not been trained for this target."""
_FIRST, _FED_BACK = range(1, 2), range(2, 5)
"""Numbers of the drafts that decide the projection's order and the feedback, whose effect grows per step."""


class CheckedModule(Head, Protocol):
    """The parts of a module that its input convention concerns; copies of it are run with the other convention."""

    spec: MtpSpec
    target_lm_head: torch.Tensor

    def whole_logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] block outputs -> [R, V] logits of all the target's tokens, whatever it drafts on."""

    def target_choice(self, states: torch.Tensor) -> torch.Tensor:
        """[R, H] states of the target after its final norm -> [R] int64, the tokens that it finds most probable."""


class CheckedHead(Protocol):
    """A head of one module or several of one input convention."""

    attention_specs: tuple[AttentionSpec, ...]

    @property
    def mtp_modules(self) -> tuple[CheckedModule, ...]:
        """Modules 0 … M-1."""


@dataclass(frozen=True)
class Comparison:
    """The chosen input convention against the other one.

    Attributes:
        option: the option of `SpeculativeModel.from_pretrained` that decides it; other: its other value.
        chosen_nats, other_nats: mean surprise of the drafts at the target's own tokens; error: standard error of their
            difference. limit: most nats of a convention that can be right. num_tokens: tokens compared.
    """

    option: str
    other: str
    chosen_nats: float
    other_nats: float
    error: float
    limit: float
    num_tokens: int

    @property
    def other_is_right(self) -> bool:
        """Whether the other convention is better beyond doubt."""
        gain = self.chosen_nats - self.other_nats
        return self.other_nats <= self.limit and gain >= max(_MARGIN, _SIGMAS * self.error)


@torch.no_grad()
def compare_conventions(
    head: CheckedHead, token_ids: torch.Tensor, states: torch.Tensor, num_drafts: int
) -> tuple[Comparison, ...]:
    """Judge the order of the projection and, if K (`num_drafts`) is two or more, the feedback.

    A comparison is omitted if both conventions coincide (no final norm), if drafts are never fed back, or if the check
    cannot run the module's kind of attention.

    Args:
        head: one module, or several of one input convention. token_ids: [T] int64, a text.
        states: [T, H], the target's states after its final norm on that text.
    """
    modules = head.mtp_modules
    if len(token_ids) < _LEAST or any(k.window or k.softcap or k.has_sinks for k in head.attention_specs):
        return ()
    spec, text = modules[0].spec, _Text(token_ids, states, modules[0].target_choice(states))
    order = "embedding_first" if spec.hidden_first else "hidden_first"
    swapped = _with_convention(modules, hidden_first=not spec.hidden_first)
    found = [_compare("mtp_concat", order, modules, swapped, text, _FIRST)]
    if num_drafts > 1 and spec.final_norm:
        norm = "pre_norm" if spec.feedback == "post_norm" else "post_norm"
        drafts = _FED_BACK if len(modules) == 1 else range(2, min(_FED_BACK.stop, len(modules) + 1))
        found.append(_compare("mtp_feedback", norm, modules, _with_convention(modules, feedback=norm), text, drafts))
    return tuple(found)


def check_convention(head: CheckedHead, token_ids: torch.Tensor, states: torch.Tensor, num_drafts: int) -> None:
    """Refuse modules that plainly run with the wrong convention; arguments as for `compare_conventions`.

    Raises:
        HeadLoadError: the other convention predicts the target's tokens far better; the message names the option.
    """
    for found in compare_conventions(head, token_ids, states, num_drafts):
        if found.other_is_right:
            raise HeadLoadError(
                f"the multi-token-prediction module is read the wrong way: its drafts miss the target's own tokens by "
                f"{found.chosen_nats:.2f} nats each, with {found.option}={found.other!r} by {found.other_nats:.2f} "
                f"(over {found.num_tokens} tokens of a test text). Give {found.option}={found.other!r}"
            )


@dataclass(frozen=True)
class _Text:
    """token_ids [T], the target's states [T, H] and its own choice after each token [T]."""

    token_ids: torch.Tensor
    states: torch.Tensor
    wanted: torch.Tensor


def _with_convention(modules: tuple[CheckedModule, ...], **changes: Any) -> tuple[CheckedModule, ...]:
    """The same weights under another convention."""
    others = tuple(copy.copy(module) for module in modules)
    for other in others:
        other.spec = replace(other.spec, **changes)
    return others


def _compare(
    option: str,
    value: str,
    chosen: tuple[CheckedModule, ...],
    other: tuple[CheckedModule, ...],
    text: _Text,
    drafts: range,
) -> Comparison:
    chosen_nats, other_nats = (_nats(each, text, drafts) for each in (chosen, other))
    gain = chosen_nats - other_nats
    return Comparison(
        option=option,
        other=value,
        chosen_nats=float(chosen_nats.mean()),
        other_nats=float(other_nats.mean()),
        error=float(gain.std()) / len(gain) ** 0.5,
        limit=_KNOWS * math.log(len(chosen[0].target_lm_head)),
        num_tokens=len(gain),
    )


def _nats(modules: tuple[CheckedModule, ...], text: _Text, drafts: range) -> torch.Tensor:
    """[T - last draft] mean surprise of some drafts at the target's own choice; drafts before them are the text's."""
    rows, last = len(text.token_ids) - drafts[-1], drafts[-1]
    outputs = _chain(modules, text, last) if len(modules) > 1 else unroll(modules[0], *_batch(text), last)
    nats = []
    for draft in drafts:
        module = modules[(draft - 1) % len(modules)]
        scores = module.whole_logits(outputs[draft - 1][:rows]).float().log_softmax(-1)  # [T - last draft, V]
        nats.append(-scores.gather(-1, text.wanted[draft : draft + rows, None])[:, 0])
    return torch.stack(nats).mean(0)


def _batch(text: _Text) -> tuple[torch.Tensor, torch.Tensor]:
    return text.token_ids[None], text.states[None]


def _chain(modules: tuple[CheckedModule, ...], text: _Text, count: int) -> list[torch.Tensor]:
    """Outputs [T, H] of modules 0 … count-1, each over the whole text and the output of the one before."""
    (ids, states), outputs = _batch(text), list[torch.Tensor]()
    hidden, positions = states[0], torch.arange(ids.shape[1], device=ids.device)
    for m, module in enumerate(modules[:count]):
        attend = TttAttend(module.attention_specs, 1, ids.shape[1])
        outputs.append(module.forward(shift_left(ids, m + 1)[0], hidden, positions, attend))
        hidden = module.feedback(outputs[-1])
    return outputs
