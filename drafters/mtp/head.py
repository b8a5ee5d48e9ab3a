"""MtpHead: one multi-token-prediction module of the DeepSeek kind as a draft head; MtpStack: several that take turns.

    x = blocks(proj([enorm(embedding of t_{p+1}), hnorm(h_p)]))     logits = lm_head(norm(x)) predict t_{p+2}

h_p is the target's state after its final norm in the draft prefill, the module's own fed-back state later. The blocks
are decoder layers of the target's own class, run one after the other by transformers' code with specdec's attention:
one of attention and an MLP, or of a target whose layers have one mixer each, several (Nemotron-H: attention, then
experts).

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; the order [embedding, hidden] and the fed-back state follow the
released code (huggingface/transformers, modeling_layers.py MtpLayer; sgl-project/sglang, deepseek_nextn.py; of
Nemotron-H vllm-project/vllm, nemotron_h_mtp.py).

Which rows each module runs, and why one vector per request and module is carried from round to round: see
`drafters.loops.prefill`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.hf.port import AttentionPort
from attention.hf.probe import Calls, expanded, recorded_calls
from drafters.base import FINAL_NORM, Layers
from drafters.checkpoints.config_fields import HeadReport
from drafters.errors import HeadLoadError
from drafters.loops.base import Attend, LoopSize
from drafters.loops.chain import ChainLoop, ModuleLoop
from drafters.loops.head_passes import MtpPasses
from drafters.mtp import convention_check
from drafters.mtp.spec import MtpSpec, MtpTarget, block_config
from drafters.vocab import check_offsets, offsets_of


class MtpHead(nn.Module):
    """One module: a `drafters.base.Head` that `HasInputConvention`. The target's embedding and lm_head are shared."""

    target_embedding: Tensor
    target_lm_head: Tensor
    target_ids: Tensor | None
    draft_rows: Tensor | None

    def __init__(self, spec: MtpSpec, target: MtpTarget, device: torch.device | None = None) -> None:
        """Build a module whose weights are still to be loaded.

        device: for the weights; default: the device of the target's embedding. "meta" allocates none, for
        `load_state_dict(..., assign=True)`.

        Raises:
            HeadLoadError: a block has no attention that transformers' interface serves, or none of them has.
            UnsupportedAttentionError: a block's attention needs something that the paged cache does not offer.
        """
        super().__init__()
        self.spec = spec
        self.checkpoint_report: HeadReport | None = None
        self.aux_layers: Layers = (FINAL_NORM,)
        self.hidden_size = target.embedding.shape[1]
        self.draft_vocab_size = target.lm_head.shape[0]
        # Not persistent: they are the target's, so they are no part of the head's checkpoint.
        self.register_buffer("target_embedding", target.embedding.detach(), persistent=False)
        self.register_buffer("target_lm_head", target.lm_head.detach(), persistent=False)
        self.register_buffer("target_ids", None, persistent=False)
        self.register_buffer("draft_rows", None, persistent=False)
        self.rotary = copy.deepcopy(target.rotary)
        self._rotary_by_kind = (
            target.rotary is not None and "layer_type" in inspect.signature(target.rotary.forward).parameters
        )
        with device or target.embedding.device:
            self.build_modules(target)
        self._attend_by(self._probe())

    def _attend_by(self, calls: Calls) -> None:
        self.attention_specs = tuple(call.attention_spec for call in calls)
        self._port = AttentionPort(self.blocks, calls)

    def expand(self) -> None:
        """From now on, a cache holds keys and values of all heads, of MLA, too: for batch-invariant attention."""
        self._attend_by(expanded(self._probe()))

    def build_modules(self, target: MtpTarget) -> None:
        config = block_config(target.config, self.spec)
        norm = target.norm_class
        size = self.hidden_size
        eps = target.norm_eps
        self.enorm = norm(size, eps=eps)
        self.hnorm = norm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=self.spec.projection_bias)
        self.blocks = nn.ModuleList(target.layer_class(config, i) for i in range(self.spec.num_blocks))
        self.norm = norm(size, eps=eps) if self.spec.final_norm else nn.Identity()

    def _attentions(self) -> list[nn.Module]:
        """The attention modules of the blocks, in the order in which they run."""
        if not self.spec.mixers:
            return [block.get_submodule("self_attn") for block in self.blocks]
        mixers = zip(self.blocks, self.spec.mixers, strict=True)
        return [block.get_submodule("mixer") for block, mixer in mixers if mixer == "full_attention"]

    def _probe(self) -> Calls:
        """Run the blocks' attention on two dummy rows and record its requirements."""
        weight = self.eh_proj.weight
        attentions = self._attentions()
        positions = torch.arange(2, device=self.target_embedding.device)[None]
        made = self._arguments(self.target_embedding.new_zeros(1, 2, 1), positions)
        arguments = {name: _moved(value, weight.device) for name, value in made.items()}
        with torch.no_grad(), recorded_calls(self.blocks) as calls:
            for attention in attentions:
                self._call(attention, weight.new_zeros(1, 2, self.hidden_size), arguments)
        if len(calls) != len(attentions) or not calls:
            raise HeadLoadError(
                f"{type(self.blocks[0]).__name__}: {len(calls)} of {len(attentions)} attention modules call "
                "transformers' attention interface; all must, and a module has one at least"
            )
        return tuple(calls)

    def _call(self, attention: nn.Module, x: Tensor, arguments: dict[str, Any]) -> None:
        try:
            attention(x, **arguments)
        except TypeError as error:
            raise HeadLoadError(
                f"{type(self.blocks[0]).__name__}: attention of this kind cannot be run as a module's block, which "
                f"gives it {', '.join(arguments)}: {error}"
            ) from error

    def _arguments(self, x: Tensor, positions: Tensor) -> dict[str, Any]:
        """Arguments of the blocks' call for x [1, T, H] at positions [1, T].

        A rotary module of several sections (text, height, width; Qwen3.5) takes positions [3, 1, T], for text three
        equal ones.
        """
        arguments = {"attention_mask": None, "position_ids": positions}
        if self.rotary is None:
            return arguments
        rotated = positions.expand(3, 1, -1) if hasattr(self.rotary, "mrope_section") else positions
        kind = (self.spec.attention,) if self._rotary_by_kind else ()
        return arguments | {"position_embeddings": self.rotary(x, rotated, *kind)}

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, H] target states after the final norm: taken as they are."""
        return aux_hidden_states

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over T rows.

        Args:
            token_ids: [T] int64, the token at position p+1.
            hidden: [T, H], the target's states at step 1, `feedback` afterwards.
            positions: [T] int64, p.
            attend: remembers K and V and attends.

        Returns:
            The last block's output [T, H], before the final norm.
        """
        with self.attending(attend):
            return self.run_block(token_ids, hidden, positions)

    def attending(self, attend: Attend) -> AbstractContextManager[None]:
        """Serve the blocks' attention with `attend` inside a block."""
        return self._port.using(lambda layer, query, key, value, sinks: attend(layer, query, key, value))

    def run_block(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """`forward` without its attention, which must be served (`attending`) meanwhile; can be compiled."""
        embedded = self.enorm(F.embedding(token_ids, self.target_embedding).to(hidden.dtype))
        state = self.hnorm(hidden)
        pair = (state, embedded) if self.spec.hidden_first else (embedded, state)
        x = self.eh_proj(torch.cat(pair, dim=-1))[None]  # [1, T, H]
        arguments = self._arguments(x, positions[None])
        for block in self.blocks:
            out = block(x, **arguments)
            x = out[0] if isinstance(out, tuple) else out
        return x[0]

    def logits(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, Vd] logits of the target's lm_head, or of the rows of it that are drafted on."""
        return self._read(x, self.target_lm_head if self.draft_rows is None else self.draft_rows)

    def whole_logits(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, V] logits of all the target's tokens."""
        return self._read(x, self.target_lm_head)

    def _read(self, x: Tensor, rows: Tensor) -> Tensor:
        return F.linear(self.norm(x).to(rows.dtype), rows)

    def feedback(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, H] hidden state of the next draft step."""
        return self.norm(x) if self.spec.feedback == "post_norm" else x

    def target_choice(self, states: Tensor) -> Tensor:
        """[R, H] states of the target after its final norm -> [R] int64, the tokens that it finds most probable."""
        return F.linear(states.to(self.target_lm_head.dtype), self.target_lm_head).argmax(-1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids are target ids, but where only some tokens are drafted on (`draft_on`)."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def draft_on(self, target_ids: Tensor) -> None:
        """See `drafters.base.DraftsOnSome`."""
        _draft_on((self,), target_ids)

    def renew_draft_rows(self, lm_head: Tensor) -> None:
        """See `drafters.base.DraftsOnSome`."""
        if self.target_ids is not None and self.draft_rows is not None:
            with torch.no_grad():
                self.draft_rows.copy_(lm_head.index_select(0, self.target_ids))

    @property
    def mtp_modules(self) -> tuple[MtpHead, ...]:
        """This one; see `MtpStack.mtp_modules`."""
        return (self,)

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        """A chain: the module is fed its own output."""
        return ChainLoop(self, MtpPasses)

    check_convention = convention_check.check_convention


def _draft_on(modules: Sequence[MtpHead], target_ids: Tensor) -> None:
    """Modules of one target draft on some of its tokens, by one copy of these rows of its lm_head.

    Source: FR-Spec, arXiv 2502.14856, section 3 (drafts on the most frequent tokens, verified on all).
    """
    lm_head = modules[0].target_lm_head
    check_offsets(offsets_of(target_ids), len(lm_head))
    with torch.inference_mode(False), torch.no_grad():  # the rows will be written to
        ids = target_ids.to(lm_head.device, torch.int64, copy=True)
        rows = lm_head.index_select(0, ids)
    for module in modules:
        module.target_ids = ids
        module.draft_rows = rows
        module.draft_vocab_size = len(ids)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, or a tuple of them, on a device; None stays."""
    if isinstance(value, tuple):
        return tuple(tensor.to(device) for tensor in value)
    return value if value is None else value.to(device)


class MtpStack(nn.Module):
    """M modules over one target. Layer m of their cache group is module m's.

    As a plain `drafters.base.Head` it is its first module, which can also draft without the others.
    """

    def __init__(self, modules: Sequence[MtpHead]) -> None:
        """Raises HeadLoadError for fewer than two modules, or for one with several attention layers."""
        super().__init__()
        if len(modules) < 2:
            raise HeadLoadError(f"{len(modules)} module: a stack has two or more; one is a head by itself")
        layers = [len(module.attention_specs) for module in modules]
        if set(layers) != {1}:
            raise HeadLoadError(
                f"{len(modules)} multi-token-prediction modules with {layers} attention layers each: modules that take "
                "turns have one each"
            )
        self.heads = nn.ModuleList(modules)
        self.checkpoint_report: HeadReport | None = None
        self.attention_specs = tuple(key for module in modules for key in module.attention_specs)
        self.aux_layers = modules[0].aux_layers
        self.hidden_size = modules[0].hidden_size
        self.draft_vocab_size = modules[0].draft_vocab_size

    @property
    def first(self) -> MtpHead:
        """The module that makes the first draft."""
        return self.heads[0]  # type: ignore[return-value]

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, H] target states after the final norm: taken as they are."""
        return aux_hidden_states

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The first module's pass; see `MtpHead.forward`."""
        return self.first.forward(token_ids, hidden, positions, attend)

    def logits(self, x: Tensor) -> Tensor:
        """The first module's logits."""
        return self.first.logits(x)

    def feedback(self, x: Tensor) -> Tensor:
        """The first module's feedback."""
        return self.first.feedback(x)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """The modules' map, which is one."""
        return self.first.to_target_ids(draft_ids)

    def draft_on(self, target_ids: Tensor) -> None:
        """See `drafters.base.DraftsOnSome`; the modules share one copy."""
        _draft_on(self.mtp_modules, target_ids)
        self.draft_vocab_size = len(target_ids)

    @property
    def draft_rows(self) -> Tensor | None:
        """Shared by all modules, see `MtpHead`."""
        return self.first.draft_rows

    def renew_draft_rows(self, lm_head: Tensor) -> None:
        """See `drafters.base.DraftsOnSome`."""
        self.first.renew_draft_rows(lm_head)

    @property
    def mtp_modules(self) -> tuple[MtpHead, ...]:
        """Modules 0 … M-1."""
        return tuple(self.heads)  # type: ignore[arg-type]

    def draft_loop(self, limits: LoopSize) -> ModuleLoop | ChainLoop:
        """A loop over the modules in turn, at most one per draft; for one draft, the chain of the first."""
        return ModuleLoop(self.mtp_modules, limits) if limits.drafts > 1 else self.first.draft_loop(limits)

    check_convention = convention_check.check_convention
