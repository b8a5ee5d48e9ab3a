"""The attention backend of a device, and the kernels it needs. User or device decide, never an exception."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attention.backends.base import AttentionBackend, GraphBackend
from attention.backends.kinds import KINDS, chosen
from attention.hf.weights import runs_plainly
from attention.spec import AttentionSpec
from specdec.errors import InvalidInputError, UnsupportedModelError
from specdec.loading.cache_format import STORED
from specdec.selftest.routers import experts_of
from specdec.user_warnings import warn_user
from specdec.wrapped.probing import TargetProbe

_WITHOUT_SOFTCAP = "sdpa"
"""transformers' function of this name ignores a softcap that it is given; newer versions (5.23) raise an error.

Source: transformers, integrations/sdpa_attention.py; in 5.17 it is the default of Gemma 2 and VaultGemma.
"""


def name_what_is_left_out(probed: TargetProbe) -> None:
    """Warn where this model's own `generate` may give other tokens than its layers describe."""
    caps = [call.attention_spec.softcap for call in probed.calls if call.attention_spec.softcap is not None]
    if not caps or probed.model.config.get_text_config()._attn_implementation != _WITHOUT_SOFTCAP:
        return
    warn_user(
        f"{type(probed.model).__name__} has attn_implementation={_WITHOUT_SOFTCAP!r}, by which transformers leaves out "
        f"(or refuses) the softcap of {max(caps):g} that its layers ask for. Here it is computed, as by 'eager': its "
        "tokens may be others than those of this model's own generate; loaded with attn_implementation='eager' it says "
        "the same"
    )


def expected_keys(config: Any) -> list[AttentionSpec]:
    """The attention kernels that a configuration's layers will need, before a model exists to probe.

    Only the fields that decide which kernel is built are filled in. [] if the configuration does not determine them.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # Gemma 4: heads differ by layer, and reading head_dim raises
        return []
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return []
    if getattr(text, "kv_lora_rank", None):
        # MLA as in DeepSeek: keys of a latent of 512 and 64 rotary dimensions, values are the latent.
        return [AttentionSpec(heads, 1, 576, 512, 1.0, value_in_key=True)]
    dim = getattr(text, "head_dim", None) or hidden // heads
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if config.model_type == "gpt_oss" or not kinds <= {"full_attention", "sliding_attention"} or (window and not kinds):
        return []
    plain = AttentionSpec(heads, heads, dim, dim, 1.0, softcap=getattr(text, "attn_logit_softcapping", None))
    windowed = [replace(plain, window=window)] if "sliding_attention" in kinds and window else []
    return windowed + ([] if kinds == {"sliding_attention"} else [plain])


def begin_kernels(
    name: str, device: torch.device, keys: Iterable[AttentionSpec], dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    """Start building the kernels of such layers, on backends that build any; arguments are named as load options."""
    kind = KINDS["flashinfer"]
    is_wanted = device.type == "cuda" and chosen(name, device) == "flashinfer"
    if is_wanted and kind.is_installed and torch.version.hip is None:
        from attention.backends.flashinfer.backend import start_building

        cache = STORED.get(kv_cache_dtype) or dtype
        for key in dict.fromkeys(keys):
            start_building(key, dtype, cache, device)


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The attention backend: "auto" is FlashInfer on CUDA, Flex (with a SpecdecWarning) if that is not installed or on
    a ROCm build, the torch reference elsewhere.

    Raises:
        InvalidInputError: a backend for CUDA elsewhere, one for NVIDIA GPUs on ROCm, or FlashInfer not
            installed.
    """
    kind = KINDS[name]
    if kind.needs_cuda and device.type != "cuda":
        raise InvalidInputError(f"backend={name!r} needs a CUDA device, not {device}; use backend='torch'")
    if kind.needs_nvidia and device.type == "cuda" and torch.version.hip is not None:
        raise InvalidInputError(
            f"backend={name!r} has kernels for NVIDIA GPUs only, and this torch is built for ROCm (HIP "
            f"{torch.version.hip}); use backend='flex' or 'torch'"
        )
    if not kind.is_installed:
        raise InvalidInputError(kind.install)
    if name == "auto" and chosen(name, device) == "flex":
        reason = 'FlashInfer is not installed (pip install "specdec-hf[cuda]")'
        if torch.version.hip is not None:
            reason = "this torch is built for ROCm, on which this library is not tested"
        warn_user(
            f"{reason}: backend='auto' is 'flex', which has no CUDA graphs and is slower; backend='flex' says this no "
            "more"
        )
    return kind.make(device)


def runs_evenly(backend: AttentionBackend) -> bool:
    """Whether a backend is batch-invariant with the model's own operators: on a CPU, where none are compiled."""
    return backend.batch_invariant and not isinstance(backend, GraphBackend)


def check_backend_fits(probed: TargetProbe, backend: AttentionBackend) -> None:
    """Check that layers compute every token alone where a batch-invariant backend promises it.

    Raises:
        UnsupportedModelError: the backend is batch-invariant and the target has quantised layers, or experts.
    """
    if not backend.batch_invariant:
        return
    from specdec.ops.mixtures.choice import sums_alike  # not at the top: it imports models of transformers

    quantised = next((layer for layer in probed.model.modules() if not runs_plainly(layer)), None)
    if probed.fp8 is not None:
        reason = "is quantised in FP8, whose matmuls run through other kernels for more tokens"
    elif quantised is not None:
        reason = (
            f"has quantised layers ({type(quantised).__name__}), whose matmuls are their library's and may sum "
            "otherwise in another batch"
        )
    elif not runs_evenly(backend) and not all(map(sums_alike, experts_of(probed.model))):
        reason = (
            "has experts whose matmuls may sum otherwise in another batch (on a GPU allowed: SwiGLU experts in float16 "
            "or bfloat16)"
        )
    else:
        return
    raise UnsupportedModelError(
        f"{type(probed.model).__name__} {reason}: not with backend='batch_invariant'; use backend='auto'"
    )
