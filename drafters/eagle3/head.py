"""Eagle3Head: the EAGLE-3 draft head and its decoder layer as modules with the checkpoint's parameter names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.eagle3.spec import Eagle1Spec, Eagle3Spec
from drafters.layers import Attention, CosSin, GatedMLP, PlainLayer, SharingHead, norm_of
from drafters.loops.base import Attend, LoopSize
from drafters.loops.chain import ChainLoop
from drafters.loops.head_passes import EaglePasses
from drafters.vocab import offsets_of


class Eagle3Layer(nn.Module):
    """The first layer: attention over [embedding, hidden], so q, k and v read 2H.

    Source: SafeAILab/EAGLE, eagle/model/cnets.py (LlamaDecoderLayeremb); `norm_before_residual` from speculators.
    """

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.norm_before_residual = spec.norm_before_residual
        self.input_layernorm = norm_of(spec)
        self.hidden_norm = norm_of(spec)
        self.self_attn = Attention(spec, index=0, input_size=2 * spec.hidden_size)
        self.post_attention_layernorm = norm_of(spec)
        self.mlp = GatedMLP(spec)

    def forward(self, embedded: Tensor, hidden: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None) -> Tensor:
        """embedded, hidden [T, H] -> block output [T, H], or [R, H] of the selected rows [R] int64."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        y = torch.cat((self.input_layernorm(embedded), normed), dim=-1)  # [T, 2H], embedding first
        residual = residual if rows is None else residual.index_select(0, rows)
        x = residual + self.self_attn(y, cos_sin, attend, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(SharingHead):
    """An EAGLE-3 head; satisfies `drafters.base.Head` and `drafters.checkpoints.config_fields.Reported`.

    Parameters carry the checkpoint's names.
    """

    spec: Eagle3Spec

    def __init__(
        self,
        spec: Eagle3Spec,
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
        self._fuses = spec.has_fc
        with device or target_embedding.device:
            self._build_modules()

    def reread(self, spec: Eagle3Spec, embedding: Tensor | None = None) -> Eagle3Head:
        """This head's own tensors under another spec of the same shapes; nothing is copied.

        embedding: [V, H] of the target, to share in place of the head's.
        """
        state = self.state_dict()
        if embedding is None:
            embedding = self.embed_tokens.weight if self.target_embedding is None else self.target_embedding
        else:
            state.pop("embed_tokens.weight", None)
        # On "meta" no memory is allocated, and assign=True puts this head's tensors in place of the meta ones.
        other = Eagle3Head(spec, embedding, self.target_lm_head, offsets_of(self.target_ids), torch.device("meta"))
        other.load_state_dict(state, assign=True)
        return other.eval().requires_grad_(False)

    def _build_modules(self) -> None:
        spec = self.spec
        if spec.has_fc:
            self.fc = nn.Linear(spec.aux_size, spec.hidden_size, bias=spec.fc_bias)
        if spec.input_norm:
            self.input_norm = nn.RMSNorm(spec.aux_size, eps=spec.rms_norm_eps)
        if spec.fc_norm:
            norms = (nn.RMSNorm(spec.target_hidden_size, eps=spec.rms_norm_eps) for _ in spec.aux_layers)
            self.fc_norm = nn.ModuleList(norms)
        self.midlayer = Eagle3Layer(spec)
        self.layers = nn.ModuleDict({str(index): PlainLayer(spec, index) for index in range(1, spec.num_layers)})
        self.norm = norm_of(spec)
        self.build_vocabulary()

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, A·Ht] aux hidden states -> [T, H] input of step 1: norms if any, then `fc`."""
        if not self._fuses:
            return aux_hidden_states
        if self.spec.input_norm:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.spec.fc_norm:
            chunks = aux_hidden_states.split(self.spec.target_hidden_size, dim=-1)
            aux_hidden_states = torch.cat(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1
            )
        return self.fc(aux_hidden_states)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """One pass over T rows.

        Args:
            token_ids: [T] int64 target-vocabulary ids, the token at position p+1.
            hidden: [T, H], `fuse`d aux hidden states at step 1, `feedback` afterwards.
            positions: [T] integers, p.
            attend: remembers K and V and attends.
            rows: [R] int64, rows whose output is computed, by default all. Other rows end at the last attention.

        Returns:
            The block output [T, H] or [R, H], before the final norm.
        """
        embedded = self.embed(token_ids).to(hidden.dtype)  # [T, H]
        cos_sin = self.rotary(positions)
        further = list(self.layers.values())
        x = self.midlayer(embedded, hidden, cos_sin, attend, None if further else rows)
        for layer in further:
            x = layer(x, cos_sin, attend, rows if layer is further[-1] else None)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, Vd] draft logits."""
        return self.read(self.norm(x))

    def feedback(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, H] hidden state of the next draft step."""
        return x if self.spec.feedback == "pre_norm" else self.norm(x)

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        """A chain."""
        return ChainLoop(self, EaglePasses)


class Eagle1Head(Eagle3Head):
    """An EAGLE-1 head.

    It predicts the target's next state after the final norm, so the target's lm_head reads its output as it is: there
    is no norm of its own. `fc` reads [embedding, hidden], and all layers are plain.

    Source: SafeAILab/EAGLE, eagle/model/cnets1.py.
    """

    spec: Eagle1Spec

    def _build_modules(self) -> None:
        spec = self.spec
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=spec.fc_bias)
        norms = (spec.first_norm, *(True for _ in range(1, spec.num_layers)))
        self.layers = nn.ModuleDict({str(index): PlainLayer(spec, index, norm) for index, norm in enumerate(norms)})
        self.norm = nn.Identity()  # type: ignore[assignment]

    def midlayer(  # type: ignore[override]
        self, embedded: Tensor, hidden: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """In place of EAGLE-3's first layer, which is a module: embedded, hidden [T, H] -> [T, H]."""
        return self.fc(torch.cat((embedded, hidden), dim=-1))  # embedding first
