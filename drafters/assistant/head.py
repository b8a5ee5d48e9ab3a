"""AssistantHead: a small causal language model as a draft head. It runs unmodified, with attention over its own pages.

It reads committed token ids and nothing of the target: position p holds the token at p, whose logits are those of the
token at p+1. So its pages hold what a plain forward over the same tokens computes.

Source: Leviathan et al. 2023, arXiv 2211.17192 (a small approximation model); huggingface/transformers,
generation/candidate_generator.py (AssistedCandidateGenerator).
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from attention.errors import UnsupportedAttentionError, named_error
from attention.hf.model_specific import changing_rope
from attention.hf.port import AttentionPort
from attention.hf.probe import Probe, probe
from attention.hf.weights import model_bytes
from drafters.base import Layers
from drafters.checkpoints.config_fields import HeadReport
from drafters.errors import HeadLoadError
from drafters.loops.base import Attend, LoopSize
from drafters.loops.tokens import TokenLoop

_UNSERVED = {"has_sinks": "attention sinks", "chunk_size": "attention in chunks", "temperature": "tuned temperatures"}
"""Fields of an AttentionSpec that need more than keys, values and a window."""

_ACCEPTED = 0.7
_MOST_DRAFTS = 8
"""A draft's assumed chance to be accepted, given those before it, and the largest K that is chosen for a user."""


class AssistantHead(nn.Module):
    """A `drafters.base.Head` around a causal language model. Its block output is the model's logits [T, V].

    While it lives, the model's own forward still works, and waits for a round's; afterwards the model is as it was.
    """

    def __init__(self, model: PreTrainedModel, report: HeadReport | None = None, vocab_size: int | None = None) -> None:
        """model: on the target's device, in its dtype. report: of the checkpoint that it was loaded from.

        vocab_size: V of the target, whose tokens have the same ids; default the model's own.

        Raises:
            HeadLoadError: a model that cannot run over the head's pages; the message has the reason.
        """
        super().__init__()
        found = _probed(model)
        self.model = model
        self.checkpoint_report = report
        self.attention_specs = tuple(call.attention_spec for call in found.calls)
        self.aux_layers: Layers = ()
        self.hidden_size = self.draft_vocab_size = vocab_size or found.vocab_size
        self._missing = self.draft_vocab_size - found.vocab_size
        self._selects_rows = found.selects_rows
        self._longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._port = AttentionPort(model, found.calls)
        # The model may be the user's, who goes on using it.
        weakref.finalize(self, self._port.release).atexit = False

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, 0]: it reads no states of the target."""
        return aux_hidden_states

    def forward(self, token_ids: Tensor, hidden: Tensor | None, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over T rows.

        Args:
            token_ids, positions: [T] int64, p and the token at p (a head that reads the target's states gets that at
                p+1). hidden: not read. attend: remembers K and V and attends.

        Returns:
            The logits [T, V] of the tokens at p+1.
        """
        with self.attending(attend):
            return self.read(token_ids, positions)

    def attending(self, attend: Attend) -> AbstractContextManager[None]:
        """Serve the model's attention with `attend` inside a block."""
        return self._port.using(lambda layer, query, key, value, sinks: attend(layer, query, key, value))

    def read(self, token_ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """`forward` inside `attending`; can be compiled. rows: [R] int64, those whose logits are computed."""
        if self._longest is not None:  # learned embeddings have no row beyond; the target's requests may be longer
            positions = positions.clamp_max(self._longest - 1)
        if self._missing > 0:  # no tokenizer makes these ids, but a prompt may have them
            token_ids = token_ids.clamp_max(self.draft_vocab_size - self._missing - 1)
        selection = {}
        if self._selects_rows:
            selection = {"logits_to_keep": 0 if rows is None else rows}
        output = self.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **selection)
        logits: Tensor = output.logits[0]
        if self._missing:  # padding that one of both has: it is never drafted, or cut off
            logits = F.pad(logits, (0, self._missing), value=-torch.inf)
        return logits if rows is None or self._selects_rows else logits.index_select(0, rows)

    def logits(self, x: Tensor) -> Tensor:
        """[R, V]: the block output itself."""
        return x

    def feedback(self, x: Tensor) -> Tensor:
        """[R, V], which the next step does not read."""
        return x

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """The ids are the same."""
        return draft_ids

    def paying_drafts(self, model: PreTrainedModel) -> tuple[int, float]:
        """See `drafters.base.PicksDrafts`: by the bytes of both models' weights, which every load counts alike."""
        return paying_drafts(model_bytes(self.model) / model_bytes(model))

    def draft_loop(self, limits: LoopSize) -> TokenLoop:
        """A chain that begins at the bonus token."""
        return TokenLoop(self)


def paying_drafts(cost: float) -> tuple[int, float]:
    """K from 1 to 8 with the most expected tokens a second, and how many times those without drafts.

    cost: time of a forward of the draft model, as a share of the target's.

    Source: Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8: (1 - a^(K+1)) / (1 - a) tokens in 1 + K·cost forwards.

    >>> [paying_drafts(cost)[0] for cost in (0.02, 0.07, 0.154, 0.4)]
    [8, 5, 3, 2]
    """
    speeds = {k: (1 - _ACCEPTED ** (k + 1)) / (1 - _ACCEPTED) / (1 + k * cost) for k in range(1, _MOST_DRAFTS + 1)}
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]


def _probed(model: PreTrainedModel) -> Probe:
    """The model's attention layers. Raises HeadLoadError: something in it cannot run over the head's pages."""
    name = type(model).__name__
    config = model.config.get_text_config()
    try:
        found = probe(model)
    except UnsupportedAttentionError as error:
        raise HeadLoadError(f"{name} cannot draft: it does not run on the paged cache: {error}") from error
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise HeadLoadError(
            f"{name} cannot draft: on four tokens with position_ids and no mask its forward raises {named_error(error)}"
        ) from error
    if found.recurrent_calls or getattr(model, "_is_stateful", False):
        raise HeadLoadError(f"{name} cannot draft: it has recurrent layers; give a model of attention layers alone")
    if len(found.calls) != config.num_hidden_layers:
        raise HeadLoadError(
            f"{name} cannot draft: it has {config.num_hidden_layers} layers, but {len(found.calls)} of them call "
            "transformers' attention interface"
        )
    for call in found.calls:
        odd = next((what for field, what in _UNSERVED.items() if getattr(call.attention_spec, field)), None)
        if odd is not None:
            raise HeadLoadError(f"{name} cannot draft: its layers have {odd}, which are not served in draft models")
    if rope := changing_rope(config):  # a row's drafts must be its own
        raise HeadLoadError(
            f"{name} cannot draft: its rotary embedding (rope_type={rope['rope_type']!r}) changes with a batch's "
            "longest row"
        )
    return found
