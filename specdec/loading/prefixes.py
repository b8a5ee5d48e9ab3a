"""Whether a model's requests can share what they begin with and attend it once, and what is said where they cannot."""

from __future__ import annotations

from typing import Any, Literal

from attention.backends.base import AttentionBackend, CascadeBackend
from drafters.loops.base import DraftLoop, SharesPages
from specdec.errors import InvalidInputError
from specdec.user_warnings import warn_user


def choose_prefix_caching(
    loop: DraftLoop[Any, Any] | None,
    asked: bool | Literal["auto"],
    recurrent: bool = False,
) -> str:
    """ "on", or "off: " and the reason.

    Args:
        loop: of the head; None without one. asked: True, False, or "auto" for wherever it can be done.
        recurrent: whether the target has recurrent layers: their state at the end of a prefix is kept nowhere. A
            SpecdecWarning says so where it was asked for.

    Raises:
        InvalidInputError: True where it cannot be done.
    """
    if asked is False:
        return "off: enable_prefix_caching=False"
    if recurrent:
        reason = "the target's recurrent layers keep the state of a row's last token alone, none of a prefix"
        if asked is True:
            warn_user(f"enable_prefix_caching=True has no effect: {reason}")
        return f"off: {reason}"
    reason = ""
    if loop is not None and not isinstance(loop, SharesPages):
        reason = f"{loop.name} do not say on how many following tokens their cache entries depend (num_following)"
    if reason and asked is True:
        raise InvalidInputError(f"enable_prefix_caching=True: {reason}; give False or 'auto'")
    return f"off: {reason}" if reason else "on"


def choose_cascade(backend: AttentionBackend, prefix_caching: str, asked: bool) -> str:
    """ "on", and the backend does so from now on; or "off: " and the reason. Which layers it does so for is its route.

    Args:
        prefix_caching: what `choose_prefix_caching` gave.

    Raises:
        InvalidInputError: asked for where it cannot be done.
    """
    if not asked:
        return "off: cascade_attention=False"
    if not isinstance(backend, CascadeBackend):
        raise InvalidInputError(
            f"cascade_attention=True: backend {backend.name!r} attends every row by itself; give backend='flashinfer' "
            "(a GPU with FlashInfer), or False"
        )
    if prefix_caching != "on":
        raise InvalidInputError(
            f"cascade_attention=True: requests share no pages, because prefix caching is {prefix_caching}; give False, "
            "or have prefixes cached"
        )
    backend.cascade()
    return "on"
