"""Whether a multi-token-prediction module is read as it was trained.

No checkpoint says in which order the projection reads its two halves, nor what a module was fed back. A wrong choice
raises nothing and only costs acceptance. So the module is run over a short text in the chosen reading and in the other
one, and both are asked for the tokens that the target itself would say next.

Only a clear difference counts. Random weights know no reading; and where the final norm's weights are all alike, both
ways of feeding back are the same function (the module's own norm removes the length), so neither is wrong.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch

from drafters.errors import HeadLoadError
from drafters.mtp import MtpHead
from drafters.mtp_spec import MtpSpec
from drafters.training.ttt import unroll

_MARGIN, _SIGMAS = 0.1, 4.0
"""The other reading must be better by so many nats a token, and by so many standard errors."""
_LEAST = 16
"""Tokens of a text that says anything."""
_KNOWS = 0.7
"""A reading that needs more than this share of log V nats a token knows too little of the target to be believed."""
_FIRST, _FED_BACK = range(1, 2), range(2, 5)
"""The drafts on which the projection's order is judged, and what is fed back: its effect grows with each step."""


@dataclass(frozen=True)
class Comparison:
    """The chosen reading against the other one.

    Attributes:
        option: the option of `SpeculativeModel.from_pretrained` that decides it; other: its other value.
        chosen_nats, other_nats: mean surprise of the drafts at the target's own tokens.
        error: standard error of their difference.
        limit: most nats of a reading that is believed.
        num_tokens: tokens judged.
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
        """Whether the other reading is better beyond doubt."""
        gain = self.chosen_nats - self.other_nats
        return self.other_nats <= self.limit and gain >= max(_MARGIN, _SIGMAS * self.error)


@torch.no_grad()
def compare_readings(
    head: MtpHead, token_ids: torch.Tensor, states: torch.Tensor, num_drafts: int
) -> tuple[Comparison, ...]:
    """Judge the order of the projection, and where K is two or more, what is fed back.

    Args:
        token_ids: [T] int64, a text.
        states: [T, H], the target's states after its final norm on that text.
        num_drafts: K.

    Returns:
        One comparison each; none where both readings are one (no final norm), where drafts are never fed back, or
        where the attention is of a kind that the comparison cannot run.
    """
    if len(token_ids) < _LEAST or any(k.window or k.softcap or k.has_sinks for k in head.plan_keys):
        return ()
    wanted = head.target_choice(states)  # [T]
    spec = head.spec
    found = [_compare(head, replace(spec, hidden_first=not spec.hidden_first), token_ids, states, wanted, _FIRST)]
    if num_drafts > 1 and spec.final_norm:
        other = replace(spec, feedback="pre_norm" if spec.feedback == "post_norm" else "post_norm")
        found.append(_compare(head, other, token_ids, states, wanted, _FED_BACK))
    return tuple(found)


def check_reading(head: MtpHead, token_ids: torch.Tensor, states: torch.Tensor, num_drafts: int) -> None:
    """Refuse a module that is plainly read the wrong way; arguments as for `compare_readings`.

    Raises:
        HeadLoadError: the other reading says the target's tokens far better; the message names the option to change.
    """
    for found in compare_readings(head, token_ids, states, num_drafts):
        if found.other_is_right:
            raise HeadLoadError(
                f"the multi-token-prediction module is read the wrong way: its drafts miss the target's own tokens by "
                f"{found.chosen_nats:.2f} nats each, with {found.option}={found.other!r} by {found.other_nats:.2f} "
                f"(over {found.num_tokens} tokens of a test text). Give {found.option}={found.other!r}"
            )


def _compare(
    head: MtpHead, spec: MtpSpec, token_ids: torch.Tensor, states: torch.Tensor, wanted: torch.Tensor, drafts: range
) -> Comparison:
    other = copy.copy(head)
    other.spec = spec
    chosen_nats, other_nats = (_nats(each, token_ids, states, wanted, drafts) for each in (head, other))
    gain = chosen_nats - other_nats
    by_order = spec.hidden_first != head.spec.hidden_first
    order = "hidden_first" if spec.hidden_first else "embedding_first"
    return Comparison(
        option="mtp_concat" if by_order else "mtp_feedback",
        other=order if by_order else spec.feedback,
        chosen_nats=float(chosen_nats.mean()),
        other_nats=float(other_nats.mean()),
        error=float(gain.std()) / len(gain) ** 0.5,
        limit=_KNOWS * math.log(head.draft_vocab_size),
        num_tokens=len(gain),
    )


def _nats(
    head: MtpHead, token_ids: torch.Tensor, states: torch.Tensor, wanted: torch.Tensor, drafts: range
) -> torch.Tensor:
    """[T - last draft] mean surprise of some drafts at the target's own choice; drafts before them are the text's."""
    rows = len(token_ids) - drafts[-1]
    outputs = unroll(head, token_ids[None], states[None], drafts[-1])
    nats = []
    for draft in drafts:
        scores = head.logits(outputs[draft - 1][:rows]).float().log_softmax(-1)  # [T - last draft, V]
        nats.append(-scores.gather(-1, wanted[draft : draft + rows, None])[:, 0])
    return torch.stack(nats).mean(0)
