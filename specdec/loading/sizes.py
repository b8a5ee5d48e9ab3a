"""How large things are when the user does not say: K and the longest request. The KV cache: `groups`."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from drafters.base import Head
from specdec.errors import InvalidInputError
from specdec.target.long_rope import find_long_rope

DEFAULT_DRAFTS = 5


def num_drafts(asked: int | None, head: Head | None) -> int:
    """K: the given one, else 5 with a head and 0 without.

    Raises:
        InvalidInputError: drafts without a head.
    """
    if head is None and asked:
        raise InvalidInputError(f"num_speculative_tokens={asked} needs a draft head: give draft=…")
    if asked is None:
        return 0 if head is None else DEFAULT_DRAFTS
    return asked


def max_model_len(asked: int | None, model: PreTrainedModel) -> int:
    """Most tokens of one request: the given limit, else the model's own limit.

    Rotary embeddings of type dynamic look at the largest position of the whole batch: one long request would change the
    others. So with them no request may be longer than the length from which on they change. Those of type longrope do
    the same; of them each token gets its own factors (`specdec.target.long_rope`), but for modules that are unknown.

    Raises:
        InvalidInputError: more than the model was made for, or the model has no limit.
    """
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    kind, original = ("", None) if find_long_rope(model) is not None else _changing_rope(config)
    if asked is None:
        if most is None:
            raise InvalidInputError("the model has no longest sequence in its configuration; give max_model_len=…")
        return int(most) if original is None else min(int(most), original)
    if most is not None and asked > most:
        raise InvalidInputError(f"max_model_len={asked}: the model was made for at most {most} positions")
    if original is not None and asked > original:
        raise InvalidInputError(
            f"max_model_len={asked}: beyond {original} positions the model's rotary embedding ({kind}) changes for all "
            f"rows of a batch at once; allowed is {original} or less"
        )
    return asked


def _changing_rope(config: PreTrainedConfig) -> tuple[str, int | None]:
    """The type of a rotary embedding that depends on the batch's longest row, and the last length before it does."""
    own = getattr(config, "rope_parameters", None) or {}
    for parameters in (own, *(p for p in own.values() if isinstance(p, dict))):
        if (kind := parameters.get("rope_type")) in ("longrope", "dynamic"):
            return kind, int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
    return "", None
