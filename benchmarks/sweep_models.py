"""Tiny random models for the sweep, and a draft head that is right about seven times in ten."""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from attention.spec import AttentionSpec
from benchmarks.sweep_configs import VOCAB, Case, tiny_config
from drafters.loops.base import Attend, LoopSize
from drafters.loops.chain import ChainLoop
from specdec.errors import ModelLoadError
from specdec.loading.targets import auto_class
from specdec.selftest.twin import enlarge

MOST_PARAMETERS = 20_000_000
_RIGHT = 70
"""Drafts out of a hundred that the scripted head knows."""


class NotBuilt(Exception):
    """No such model can be made here; the message says why."""


class NumberTokenizer:
    """Writes token ids as numbers; the sweep's prompts are ids."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))


def build(case: Case) -> PreTrainedModel:
    """The case's model in float32, with its default attention and no token that ends a text.

    Raises:
        ModelLoadError: specdec loads no model of this type.
        NotBuilt: its configuration or its model cannot be made, or is not small.
    """
    try:
        config = tiny_config(case)
        if case.wrapper is not None:
            auto_class(config)
        with torch.device("meta"):
            size = sum(p.numel() for p in _model(case, config).parameters())
    except ModelLoadError:
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    if size > MOST_PARAMETERS:
        raise NotBuilt(f"{size:,} parameters: the shrinker misses a field")
    torch.manual_seed(0)
    try:
        model = _model(case, config).eval().requires_grad_(False)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    enlarge(model)
    model.generation_config = GenerationConfig()
    return model


def _model(case: Case, config: Any) -> PreTrainedModel:
    if case.class_name is not None:
        model: PreTrainedModel = getattr(transformers, case.class_name)(config)
        return model
    loader = AutoModelForCausalLM if case.wrapper is None else auto_class(config).loader
    return loader.from_config(config)


def eager_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with eager attention, which does without some of what other attention does, and the reverse."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    return copied


def prompts_of(
    lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB, left_out: Container[int] = ()
) -> list[list[int]]:
    """Random prompts; the lowest ids, where special tokens lie, are left out, and those that stand for no text."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(8, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    plain = next(token for token in range(8, vocab_size) if token not in left_out)
    return [[plain if token in left_out else token for token in row] for row in rows]


class ScriptedHead(torch.nn.Module):
    """A head that knows the texts it will be asked about, and forgets three tokens in ten.

    Satisfies `drafters.base.Head`. Its block output is one-hot: the token it drafts. At (position, token) pairs that
    stand in none of the texts it drafts token 0.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], vocab_size: int, aux_layers: tuple[int, ...], device: Any
    ) -> None:
        super().__init__()
        self.attention_specs = (AttentionSpec(1, 1, 8, 8, scale=1.0),)
        self.aux_layers, self.hidden_size, self.draft_vocab_size = aux_layers, vocab_size, vocab_size
        longest = max(map(len, texts)) + 64
        table = torch.zeros(longest, vocab_size, dtype=torch.long)  # [position, token there] -> the next token
        for text in texts:
            for at, (token, following) in enumerate(pairwise(text)):
                knows = (at * 7919 + token * 104729) % 100 < _RIGHT
                table[at, token] = following if knows else (following + 1) % min(VOCAB, vocab_size)
        self.table = table.to(device)

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """The width of the aux hidden states is all that is asked of them."""
        return aux_hidden_states.new_zeros(aux_hidden_states.shape[0], self.hidden_size)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        drafted = self.table[(positions + 1).clamp(max=len(self.table) - 1), token_ids]
        x = torch.nn.functional.one_hot(drafted, self.hidden_size).to(hidden.dtype)
        query = x[:, None, :8].contiguous()
        return x + 0 * attend(0, query, query, query).flatten(1).sum(-1, keepdim=True)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        """A chain."""
        return ChainLoop(self)
