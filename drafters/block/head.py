"""BlockParallelHead: a draft head that fills a whole block in one pass, with the checkpoint's names.

    f_p = hidden_norm(fc(aux states at p))        a layer keeps k_norm(k_proj f_p), v_proj f_p of the context, k at p
    x = layers(embeddings of bonus token, masks)  the block's rows pass input_layernorm before the same projections
    logits = lm_head(norm(x))                     then a bias from the draft before: Markov head (DSpark), selector

No state of the target enters the residual stream. Layers of DFlash2 have convolutions over the block's slots.

Source: z-lab/dflash, dflash/model.py; deepseek-ai/DeepSpec, deepspec/modeling/dspark/qwen3/modeling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from drafters.block.spec import BlockSpec
from drafters.eagle3.head import CosSin, PlainLayer, SharingHead, norm_of
from drafters.loops.base import Attend, BlockChain, KeysAndValues, LoopSize
from drafters.loops.block.chains import MARKOVS, Independent, Markov, Selector, drafting_slots
from drafters.loops.block.loop import BlockLoop
from drafters.rope import rotate


class BlockConvolution(nn.Module):
    """Convolutions over a block's slots before and after a sublayer; zeros lie before the block's first slot.

    y_t = sum over j of (base_j + correction_tj)·x_(t-j): the base is one number a channel, the correction one a group
    of channels, by the sublayer's input at t.

    Source: z-lab/dflash, dflash/model.py (GroupedDynamicCausalConv).
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        taps, groups = spec.conv_kernel_size, spec.hidden_size // spec.conv_group_size
        self._block_size, self._shape = spec.block_size, (2, taps, groups, 1)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, spec.hidden_size))
        self.kernel_projection = nn.Linear(spec.hidden_size, 2 * taps * groups, bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x [T, H] of whole blocks -> [T, H]."""
        before, after = self.kernel_projection(x).unflatten(1, self._shape).unbind(1)
        return self.over_slots(sublayer(self.over_slots(x, 0, before)), 1, after)

    def over_slots(self, x: Tensor, side: int, corrections: Tensor) -> Tensor:
        """x [T, H]; side: 0 before, 1 after the sublayer; corrections: [T, taps, groups, 1].

        Tokens stay in one dimension: compiled code kept on disk has no condition on T then.
        """
        taps = self.base_kernel[side].unflatten(1, (corrections.shape[2], -1))  # [taps, groups, channels]
        groups, out = x.unflatten(1, taps.shape[1:]), torch.zeros_like(x)
        slots = torch.arange(len(x), device=x.device) % self._block_size
        for back, base in enumerate(taps):
            earlier = groups.roll(back, 0).masked_fill((slots < back)[:, None, None], 0)
            out = out + (base * earlier).flatten(1) + (corrections[:, back] * earlier).flatten(1)
        return out


class ConvolvedLayer(PlainLayer):
    """A layer with convolutions around its attention and its MLP."""

    def __init__(self, spec: BlockSpec, index: int) -> None:
        super().__init__(spec, index)
        self.attention_conv, self.mlp_conv = BlockConvolution(spec), BlockConvolution(spec)

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None) -> Tensor:
        """x [T, H] of whole blocks, rows None -> [T, H]."""
        y = self.input_layernorm(x)
        x = x + self.attention_conv(y, lambda y: self.self_attn(y, cos_sin, attend, rows))
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class BlockParallelHead(SharingHead):
    """A `drafters.base.RatesDrafts`, and `drafters.checkpoints.config_fields.Reported`."""

    spec: BlockSpec

    def build_modules(self) -> None:
        """Make the modules of the checkpoint."""
        spec = self.spec
        self.block_size, self.first_slot, self.mask_token_id = spec.block_size, spec.first_slot, spec.mask_token_id
        self.build_embedding()
        self.fc = nn.Linear(spec.aux_size, spec.hidden_size, bias=False)
        self.hidden_norm, self.norm = norm_of(spec), norm_of(spec)
        layer = ConvolvedLayer if spec.conv_kernel_size else PlainLayer
        self.layers = nn.ModuleList(layer(spec, index) for index in range(spec.num_layers))
        if spec.markov:
            sizes = spec.vocab_size, spec.draft_vocab_size, spec.hidden_size, spec.markov_rank
            self.markov_head: Markov = MARKOVS[spec.markov](*sizes)
        if spec.selector_rank:
            self.candidate_selector = Selector(
                spec.vocab_size, spec.hidden_size, spec.selector_rank, spec.selector_top_k
            )
        self.has_confidence = spec.confidence is not None
        if spec.confidence:
            width = spec.hidden_size + (spec.markov_rank if spec.confidence == "outputs and tokens" else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        self.build_lm_head()

    @property
    def chain(self) -> BlockChain:
        """How drafts depend on the drafts before them."""
        if self.spec.selector_rank:
            return self.candidate_selector
        return self.markov_head if self.spec.markov else Independent()

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, A·Ht] aux hidden states -> [T, H] f."""
        return self.hidden_norm(self.fc(aux_hidden_states))

    def context(self, hidden: Tensor, positions: Tensor) -> KeysAndValues:
        """See `BlockHead.context`; the layers' `input_layernorm` is for the block's rows alone."""
        cos_sin = self.rotary(positions)
        each = (layer.self_attn.key_and_value(hidden) for layer in self._layers)
        return [(rotate(key, *cos_sin), value) for key, value in each]

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

    def confidence_logits(self, x: Tensor, previous: Tensor) -> Tensor:
        """See `RatesDrafts.confidence_logits`; previous tokens are read by their embeddings in the Markov head.

        Source: deepseek-ai/DeepSpec, deepspec/modeling/dspark (AcceptRatePredictor).
        """
        if self.spec.confidence == "outputs and tokens":
            x = torch.cat((x, self.markov_head.markov_w1(previous)), -1)
        odds = self.confidence_head["proj"](x)[..., 0].float()
        own = self.spec.confidence_temperatures[self.first_slot :][: odds.shape[-1]]
        return odds / odds.new_tensor(own) if own else odds

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        """Divide the log odds of drafts 1, 2, … by these from now on, of all drafts that a block gives."""
        self.spec = replace(self.spec, confidence_temperatures=(1.0,) * self.first_slot + temperatures)

    def num_confident(self, least: float, x: Tensor, bonus: Tensor, drafts: Tensor) -> Tensor:
        """[R] int64, leading drafts of each row whose confidence is `least` or more.

        x: [R, Q, H] outputs of whole blocks. bonus, drafts: [R] and [R, n] int64 target ids.
        """
        own = drafting_slots(self, x, drafts.shape[1])
        odds = self.confidence_logits(own, torch.cat((bonus[:, None], drafts[:, :-1]), 1))
        return (odds.sigmoid() >= least).cumprod(1).sum(1)

    def draft_loop(self, limits: LoopSize, min_confidence: float | None = None) -> BlockLoop:
        """One pass over the block, and its chain; see `RatesDrafts.draft_loop`."""
        return BlockLoop(self, None if min_confidence is None else partial(self.num_confident, min_confidence))
