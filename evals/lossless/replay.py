"""The target once more, by transformers alone and in higher precision: it judges where two answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

_HIGHER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Replay:
    """A copy with transformers' own eager attention and experts: float32 models in float64, half precision in float32.

    Attributes:
        dtype: of the copy.
    """

    def __init__(self, hf_model: Any) -> None:
        self.dtype = _HIGHER.get(hf_model.dtype, torch.float64)
        self._model = AutoModelForCausalLM.from_config(
            hf_model.config, dtype=self.dtype, attn_implementation="eager"
        ).to(hf_model.device)
        self._model.set_experts_implementation("eager")  # grouped matmuls know no float64
        self._model.load_state_dict(hf_model.state_dict())
        self._model.eval()

    @classmethod
    def of(cls, model: Any) -> Replay:
        """Of a SpeculativeModel. With several ranks its checkpoint is read again: here is a share of its weights."""
        if getattr(model, "ranks", None) is None:
            return cls(model.hf_model)
        checkpoint = model.checkpoint
        whole = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=model.dtype, **checkpoint.options)
        return cls(whole.to(model.device))

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of the token after `token_ids`: [V], in the copy's dtype, on the CPU."""
        return self._forward(token_ids)[-1].cpu()

    @torch.inference_mode()
    def all_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after every one of `token_ids`: [T, V], in the copy's dtype, on the CPU."""
        return self._forward(token_ids).cpu()

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        return self._model(ids, use_cache=False).logits[0]
