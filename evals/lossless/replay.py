"""The target once more, by transformers alone and in higher precision: it judges where two answers differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec.errors import OutOfDeviceMemoryError

_HIGHER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
_AT_ONCE = 32
"""Texts of one forward pass."""


class Replay:
    """A copy with transformers' own eager attention and experts: float32 models in float64, half precision in float32.

    Attributes:
        dtype: of the copy.
    """

    def __init__(self, hf_model: Any, device: torch.device | None = None) -> None:
        """hf_model: a whole one. device: of the copy, default the model's.

        Raises:
            OutOfDeviceMemoryError: there is no room for the copy.
        """
        self.dtype = _higher(hf_model.dtype)
        place = hf_model.device if device is None else device
        check_room(hf_model.config, self.dtype, place)
        self._model = AutoModelForCausalLM.from_config(
            hf_model.config, dtype=self.dtype, attn_implementation="eager"
        ).to(place)
        self._model.set_experts_implementation("eager")  # grouped matmuls know no float64
        self._model.load_state_dict(hf_model.state_dict())
        self._model.eval()
        known = signature(self._model.forward).parameters
        self._keeps_few = "logits_to_keep" in known

    @classmethod
    def of(cls, model: Any) -> Replay:
        """Of a SpeculativeModel. With several ranks its checkpoint is read again: here is a share of its weights.

        Raises:
            OutOfDeviceMemoryError: this rank's GPU has no room for all of it.
        """
        if getattr(model, "ranks", None) is None:
            return cls(model.hf_model)
        check_room(model.hf_model.config, _higher(model.dtype), model.device)  # before anything is read
        checkpoint = model.checkpoint
        whole = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=model.dtype, **checkpoint.options)
        return cls(whole, model.device)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of the token after `token_ids`: [V], in the copy's dtype, on the CPU."""
        return self._forward(token_ids)[-1].cpu()

    @torch.inference_mode()
    def all_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after every one of `token_ids`: [T, V], in the copy's dtype, on the CPU."""
        return self._forward(token_ids).cpu()

    def logits_after(
        self, prompt: tuple[int, ...], texts: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Each of several texts that follow `prompt`, none of them empty, with the logits after every one of its
        tokens: [len(text), V], on the CPU. Texts of one length that stand side by side share a forward pass.
        """
        for length, group in groupby(texts, len):
            some = list(group)
            for start in range(0, len(some), _AT_ONCE):
                chunk = some[start : start + _AT_ONCE]
                yield from zip(chunk, self._after([(*prompt, *text) for text in chunk], length), strict=True)

    @torch.inference_mode()
    def _after(self, texts: Sequence[Sequence[int]], last: int) -> torch.Tensor:
        ids = torch.tensor(texts, device=self._model.device)
        few = {"logits_to_keep": last} if self._keeps_few else {}
        return self._model(ids, use_cache=False, **few).logits[:, -last:].cpu()

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        return self._model(ids, use_cache=False).logits[0]


def _higher(dtype: torch.dtype) -> torch.dtype:
    return _HIGHER.get(dtype, torch.float64)


def check_room(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a copy that a GPU has no room for, before it is made.

    Raises:
        OutOfDeviceMemoryError: with what it takes, and what is free.
    """
    if device.type != "cuda":
        return
    with torch.device("meta"):
        copy = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    weights = sum(parameter.numel() for parameter in copy.parameters())
    needed, (free, total) = weights * dtype.itemsize, torch.cuda.mem_get_info(device)
    if needed > free:
        raise OutOfDeviceMemoryError(
            f"the check replays the whole target in {str(dtype).removeprefix('torch.')}, which takes "
            f"{needed / 2**30:.1f} GiB on {device}; {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free. Give a "
            "smaller KV cache (--kv-cache-tokens, --gpu-memory-utilization); a target that one GPU cannot hold so has "
            "no replay: `specdec eval acceptance` compares its answers with the target's alone, without one"
        )
