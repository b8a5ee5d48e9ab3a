"""What a model's own attention leaves out that its layers ask for, and that is computed here."""

from __future__ import annotations

from specdec.target.probing import TargetProbe
from specdec.user_warnings import warn_user

_WITHOUT_SOFTCAP = "sdpa"
"""transformers' function for it is given a softcap and does not read it; newer versions (5.23) raise an error.

Source: transformers, integrations/sdpa_attention.py; in 5.17 Gemma 2 and VaultGemma run by it unless told otherwise.
"""


def name_what_is_left_out(probed: TargetProbe) -> None:
    """Warn where this model's own `generate` may say other tokens than its layers describe."""
    caps = [call.attention_spec.softcap for call in probed.calls if call.attention_spec.softcap is not None]
    if not caps or probed.model.config.get_text_config()._attn_implementation != _WITHOUT_SOFTCAP:
        return
    warn_user(
        f"{type(probed.model).__name__} has attn_implementation={_WITHOUT_SOFTCAP!r}, by which transformers leaves out "
        f"(or refuses) the softcap of {max(caps):g} that its layers ask for. Here it is computed, as by 'eager': its "
        "tokens may be others than those of this model's own generate; loaded with attn_implementation='eager' it says "
        "the same"
    )
