"""BlockParallelHead: a draft head that fills a whole block in one pass (DFlash, DSpark), with the checkpoint's names.

    f_p = hidden_norm(fc(aux states at p))        a layer keeps k_norm(k_proj f_p), v_proj f_p of the context, k at p
    x = layers(embeddings of bonus token, masks)  the block's rows pass input_layernorm before the same projections
    logits = lm_head(norm(x))                     then the Markov head's bias from the draft before

No state of the target enters the residual stream.

Source: z-lab/dflash, dflash/model.py; deepseek-ai/DeepSpec, deepspec/modeling/dspark/qwen3/modeling.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.block.spec import BlockSpec
from drafters.eagle3.head import PlainLayer, SharingHead, norm_of
from drafters.loops.base import Attend, BlockChain, LoopSize
from drafters.loops.block.loop import BlockLoop
from drafters.loops.block.markov import MARKOVS, Independent, Markov


class BlockParallelHead(SharingHead):
    """A `drafters.base.BlockHead`, and `drafters.checkpoints.config_fields.Reported`."""

    spec: BlockSpec

    def __init__(
        self,
        spec: BlockSpec,
        target_embedding: Tensor,
        target_lm_head: Tensor | None = None,
        d2t: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Build a head with fresh float32 weights; arguments and errors as of `SharingHead`.

        device: for the fresh weights; default: the device of `target_embedding`. "meta" allocates none, for
        `load_state_dict(..., assign=True)`.
        """
        super().__init__(spec, target_embedding, target_lm_head, d2t)
        self.block_size, self.first_slot, self.mask_token_id = spec.block_size, spec.first_slot, spec.mask_token_id
        with device or target_embedding.device:
            self._build_modules()

    def _build_modules(self) -> None:
        spec = self.spec
        self.build_embedding()
        self.fc = nn.Linear(spec.aux_size, spec.hidden_size, bias=False)
        self.hidden_norm, self.norm = norm_of(spec), norm_of(spec)
        self.layers = nn.ModuleList(PlainLayer(spec, index) for index in range(spec.num_layers))
        if spec.markov:
            sizes = spec.vocab_size, spec.draft_vocab_size, spec.hidden_size, spec.markov_rank
            self.markov_head: Markov = MARKOVS[spec.markov](*sizes)
        if spec.confidence:
            width = spec.hidden_size + (spec.markov_rank if spec.confidence == "outputs and tokens" else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        self.build_lm_head()

    @property
    def chain(self) -> BlockChain:
        """How drafts depend on the drafts before them."""
        return self.markov_head if self.spec.markov else Independent()

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, A·Ht] aux hidden states -> [T, H] f."""
        return self.hidden_norm(self.fc(aux_hidden_states))

    def context(self, hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `BlockHead.context`; the layers' `input_layernorm` is for the block's rows alone."""
        cos_sin = self.rotary(positions)
        return [layer.self_attn.key_and_value(hidden, cos_sin) for layer in self._layers]

    def block(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `BlockHead.block`; the outputs are those of the final norm."""
        x, cos_sin = self.embed(token_ids).to(self.fc.weight.dtype) * self.spec.embedding_scale, self.rotary(positions)
        for layer in self._layers:
            x = layer(x, cos_sin, attend, None)
        return self.norm(x)

    @property
    def _layers(self) -> list[PlainLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def logits(self, x: Tensor) -> Tensor:
        """[R, H] outputs -> [R, Vd] logits of the slots by themselves, without the chain's bias."""
        logits, cap = self.read(x) * self.spec.logit_scale, self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def draft_loop(self, limits: LoopSize) -> BlockLoop:
        """One pass over the block, and its chain."""
        return BlockLoop(self)
