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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters.base import ChainHead
from drafters.checkpoints.tensor_files import Json
from drafters.errors import HeadLoadError
from drafters.mtp.spec import MtpSpec
from drafters.unroll import Gain, TttAttend, shift_left, unroll

_LEAST = 16
"""Fewest tokens of a text for a comparison."""
_KNOWS = 0.7
"""A convention whose surprise is more than this share of log V nats per token has not been trained for this target."""
_FIRST = range(1, 2)
_FED_BACK = range(2, 5)
"""Numbers of the drafts that decide the projection's order and the feedback, whose effect grows per step."""


class CheckedModule(ChainHead, Protocol):
    """The parts of a module that its input convention concerns; copies of it are run with the other convention."""

    spec: MtpSpec
    target_lm_head: Tensor

    def whole_logits(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, V] logits of all the target's tokens, whatever it drafts on."""

    def target_choice(self, states: Tensor) -> Tensor:
        """[R, H] states of the target after its final norm -> [R] int64, the tokens that it finds most probable."""


Modules = Sequence[CheckedModule]
"""One module, or several of one input convention."""


@dataclass(frozen=True)
class Comparison:
    """The chosen input convention against the other one.

    Attributes:
        option: the option of `SpeculativeModel.from_pretrained` that decides it; other: its other value.
        chosen_nats, other_nats: mean surprise of the drafts at the target's own tokens; gain: their difference.
        limit: most nats of a convention that can be right. num_tokens: tokens compared.
    """

    option: str
    other: str
    chosen_nats: float
    other_nats: float
    gain: Gain
    limit: float
    num_tokens: int

    @property
    def other_is_right(self) -> bool:
        """Whether the other convention is better beyond doubt."""
        return self.other_nats <= self.limit and self.gain.is_clear


@torch.no_grad()
def compare_conventions(modules: Modules, token_ids: Tensor, states: Tensor, num_drafts: int) -> tuple[Comparison, ...]:
    """Judge the order of the projection and, if K (`num_drafts`) is two or more, the feedback.

    A comparison is omitted if both conventions coincide (no final norm), if drafts are never fed back, or if the check
    cannot run the modules' kind of attention.

    Args:
        token_ids: [T] int64, a text. states: [T, H], the target's states after its final norm on that text.
    """
    attention = [spec for module in modules for spec in module.attention_specs]
    if len(token_ids) < _LEAST or any(k.features for k in attention):
        return ()
    spec = modules[0].spec
    order = "embedding_first" if spec.hidden_first else "hidden_first"
    others: list[tuple[str, str, Json, range]] = [
        ("mtp_concat", order, {"hidden_first": not spec.hidden_first}, _FIRST)
    ]
    if num_drafts > 1 and spec.final_norm:
        norm = "pre_norm" if spec.feedback == "post_norm" else "post_norm"
        drafts = _FED_BACK if len(modules) == 1 else range(2, min(_FED_BACK.stop, len(modules) + 1))
        others.append(("mtp_feedback", norm, {"feedback": norm}, drafts))
    found = []
    for option, other, changes, drafts in others:
        chosen_nats = _nats(modules, token_ids, states, drafts)
        other_nats = _nats(_with_convention(modules, changes), token_ids, states, drafts)
        limit = _KNOWS * math.log(len(modules[0].target_lm_head))
        gain = Gain.of(chosen_nats - other_nats)
        nats = float(chosen_nats.mean()), float(other_nats.mean())
        found.append(Comparison(option, other, *nats, gain, limit, len(chosen_nats)))
    return tuple(found)


def check_convention(head: Any, token_ids: Tensor, states: Tensor, num_drafts: int) -> None:
    """Refuse a head whose modules plainly run with the wrong convention; arguments as for `compare_conventions`.

    Raises:
        HeadLoadError: the other convention predicts the target's tokens far better; the message names the option.
    """
    for found in compare_conventions(head.mtp_modules, token_ids, states, num_drafts):
        if found.other_is_right:
            raise HeadLoadError(
                f"the multi-token-prediction module is read the wrong way: its drafts miss the target's own tokens by "
                f"{found.chosen_nats:.2f} nats each, with {found.option}={found.other!r} by {found.other_nats:.2f} "
                f"(over {found.num_tokens} tokens of a test text). Give {found.option}={found.other!r}"
            )


def _with_convention(modules: Modules, changes: Json) -> Modules:
    """The same weights under another convention."""
    others = [copy.copy(module) for module in modules]
    for other in others:
        other.spec = replace(other.spec, **changes)
    return others


def _nats(modules: Modules, token_ids: Tensor, states: Tensor, drafts: range) -> Tensor:
    """[T - last draft] mean surprise of some drafts at the target's own choice; drafts before them are the text's."""
    wanted = modules[0].target_choice(states)
    last = drafts[-1]
    run = (
        _chain(modules, token_ids, states)
        if len(modules) > 1
        else unroll(modules[0], token_ids[None], states[None], last)
    )
    rows = len(token_ids) - last
    nats = []
    for draft in drafts:
        module = modules[(draft - 1) % len(modules)]
        scores = module.whole_logits(run[draft - 1][:rows]).float().log_softmax(-1)  # [T - last draft, V]
        nats.append(-scores.gather(-1, wanted[draft : draft + rows, None])[:, 0])
    return torch.stack(nats).mean(0)


def _chain(modules: Modules, token_ids: Tensor, states: Tensor) -> list[Tensor]:
    """Outputs [T, H] of each module, over the whole text and the output of the one before."""
    hidden = states
    positions = torch.arange(len(token_ids), device=token_ids.device)
    outputs = list[Tensor]()
    for m, module in enumerate(modules):
        attend = TttAttend(module.attention_specs, 1, len(token_ids))
        outputs.append(module.forward(shift_left(token_ids[None], m + 1)[0], hidden, positions, attend))
        hidden = module.feedback(outputs[-1])
    return outputs
