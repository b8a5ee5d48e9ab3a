"""The target: an unmodified AutoModelForCausalLM whose attention reads and writes the paged cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from attention.batch.metadata import CommonAttentionMetadata
from attention.groups import Runner
from attention.hf.custom_op import LayerAttend
from attention.hf.gate import gate_of
from attention.hf.patches import Value
from attention.hf.port import AttentionPort
from attention.hf.training_mode import evaluating, trainable_modules
from attention.runner import PlannedBatch
from drafters.base import FINAL_NORM, Layers
from specdec.errors import InvalidInputError, InvariantError
from specdec.values import Function, Options
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.group import ALONE, Group
from specdec.wrapped.long_rope import RotaryPositions, find_long_rope, looked_up
from specdec.wrapped.probing import TargetProbe, decoder_of, last_states

if TYPE_CHECKING:
    from attention.recurrence.hf_port import RecurrentPort
    from attention.recurrence.runner import Recur, StateRunner
    from specdec.wrapped.recorded import RecordedSteps

_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_(token|patch)_(id|index)")


class AuxStateRecorder:
    """Copies the aux hidden states that a head reads into one buffer at a fixed place, [max_tokens, A·Ht].

    Hooks, not `output_hidden_states`: the list form of that means different layers in different transformers releases.
    """

    def __init__(self, probed: TargetProbe, aux_layers: Layers, max_tokens: int, alterations: Alterations) -> None:
        """Raises InvalidInputError for an aux layer that the target does not have (nothing is hooked then), and
        UnsupportedModelError for a model without a last state, where that is read."""
        num_layers = len(probed.layers)
        for layer in aux_layers:
            if layer != FINAL_NORM and not 0 <= layer <= num_layers:
                raise InvalidInputError(f"aux layer {layer}: the target has aux layers 0 … {num_layers}")
        weight: Tensor = probed.model.get_input_embeddings().weight  # type: ignore[assignment]
        self._width = probed.model.config.get_text_config().hidden_size
        self.buffer = torch.zeros(max_tokens, len(aux_layers) * self._width, dtype=weight.dtype, device=weight.device)
        self._on = False
        self._thread: int | None = None
        self._caught: dict[int, Tensor] = {}
        self._missing: set[int] = set()
        self._num_tokens = 0
        self._places = range(len(aux_layers))
        for place, layer in enumerate(aux_layers):
            if layer == FINAL_NORM:
                alterations.hook_after(decoder_of(probed.model), partial(self._after_decoder, place))
            elif layer == num_layers:
                alterations.hook_after(probed.layers[-1], partial(self._after_layer, place))
            else:
                alterations.hook_before(probed.layers[layer], partial(self._before_layer, place))

    @contextmanager
    def recording(self, num_tokens: int, keep: bool = True) -> Iterator[None]:
        """Record the forward inside. The user's forwards are not recorded: states of a queued verification must outlive
        them.

        Args:
            num_tokens: T, rows that count; a compiled forward may have one more.
            keep: False for a forward whose aux hidden states are unused; it may be longer than the buffer. Compiled
                code is the same for both.

        Raises:
            InvariantError: the states have more rows than the buffer (before the forward), or a hook was not called or
                got fewer rows than T (after it): a head would draft from an earlier forward's states.
        """
        if keep and self._places and num_tokens > len(self.buffer):
            raise InvariantError(
                f"{num_tokens} tokens are to be read in one forward; the buffer of aux hidden states holds "
                f"{len(self.buffer)}"
            )
        self._on = True
        self._thread = get_ident()
        self._num_tokens = num_tokens if keep else 0
        self._missing.update(self._places if keep else ())
        try:
            yield
            if self._caught:
                self._copy_caught()
            if self._missing:
                raise InvariantError(f"the target ran without passing aux hidden states {sorted(self._missing)}")
        finally:
            self._on = False
            self._caught.clear()  # a forward that raised leaves no states to the next one
            self._missing.clear()

    def _after_decoder(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._on:
            self._store(place, last_states(module, output, self._width))

    def _before_layer(self, place: int, module: nn.Module, args: tuple[Any, ...], kwargs: Options) -> None:
        self._store(place, args[0] if args else kwargs["hidden_states"])

    def _after_layer(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        self._store(place, output[0] if isinstance(output, tuple) else output)

    def _store(self, place: int, states: Tensor) -> None:
        if not self._on:
            return
        if torch.compiler.is_compiling():
            # A copy into the buffer inside compiled code would rewrite the whole buffer: 0.56 ms per round at 8B.
            self._caught[place] = states
        elif self._thread == get_ident() and self._num_tokens:
            start = place * self._width
            self.buffer[: self._num_tokens, start : start + self._width].copy_(self._rows(states))
            self._missing.discard(place)

    def _copy_caught(self) -> None:
        """Copy the states that compiled code passed, in one launch."""
        if not self._num_tokens:
            return
        if len(self._caught) < len(self._places):  # the others were copied, or are missing
            for place, states in self._caught.items():
                self._store(place, states)
            return
        rows = [self._rows(self._caught[place]) for place in self._places]
        torch.cat(rows, dim=-1, out=self.buffer[: self._num_tokens])
        self._missing.clear()

    def _rows(self, states: Tensor) -> Tensor:
        """[T, H] of the forward's tokens."""
        rows = states.reshape(-1, self._width)[: self._num_tokens]
        if len(rows) < self._num_tokens:
            raise InvariantError(f"aux hidden states of {len(rows)} tokens in a forward of {self._num_tokens}")
        return rows


@dataclass(frozen=True)
class TargetOutput:
    """logits [R, V] at the logits indices; aux_hidden_states [T, A·Ht], the aux hidden states.

    `aux_hidden_states` is a view of that buffer, valid until the next forward.
    """

    logits: Tensor
    aux_hidden_states: Tensor


class Target:
    """The model over one GroupRunner, or one GroupedRunner where layers are in several cache groups.

    Attributes:
        runner: the attention of its layers. num_layers: decoder layers.
        states, fp8: the states of its recurrent layers, and its FP8 layers; None where it has none.
        uncalled: modules whose weights rounds read without calling them (MLA's up projections). tabulated: modules
            whose results were computed at loading (rotary modules of longrope models).
        placeholders: token ids of images, videos and sound, which are refused: only text is served.
        long_rope: the rule of a longrope model's requests; None for other models.
        steps: recordings of its steps; None where none are to be made.
        alterations: changes to the model for this target and its executor.
        group: the processes that run it together.
    """

    def __init__(
        self,
        probed: TargetProbe,
        runner: Runner,
        aux_layers: Layers,
        max_tokens: int,
        states: StateRunner | None = None,
        max_positions: int | None = None,
        group: Group = ALONE,
        borrowed: Iterable[Value] = (),
    ) -> None:
        """states: for the probe's recurrent calls. max_positions: positions of a token; default the model's own.
        borrowed: see `AttentionPort`."""
        self.hf_model = probed.model
        self.vocab_size = probed.vocab_size
        self.runner = runner
        self.steps: RecordedSteps | None = None
        self.states = states
        self.group = group
        self.num_layers = len(probed.layers)
        self.placeholders = placeholders(probed.model.config)
        self._selects_rows = probed.selects_rows
        self.alterations = Alterations(self)
        self.fp8 = probed.fp8
        if probed.fp8 is not None:  # first, so that it is undone last, when these modules have no other alterations
            self.alterations.on_undo(probed.fp8.release)
        self._recorder = AuxStateRecorder(probed, aux_layers, max(max_tokens, 2) if aux_layers else 0, self.alterations)
        found = find_long_rope(probed.model)
        self.tabulated = () if found is None else found.modules
        self.max_positions = max_positions if self.tabulated else None
        self.long_rope = None if found is None else found.rule
        values = [*borrowed]
        if found is not None:
            most = max_positions or probed.model.config.get_text_config().max_position_embeddings
            values += looked_up(found, self._embedding[:0], most)
        self._port = AttentionPort(probed.model, probed.calls, values)
        latent = [call.latent.module for call in probed.calls if call.latent is not None]
        self.uncalled = tuple(module.get_submodule("kv_b_proj") for module in latent)
        self.alterations.on_undo(self._port.release)
        self._recurrent: RecurrentPort | None = None
        if probed.recurrent_calls:
            from attention.recurrence.hf_port import RecurrentPort

            self._recurrent = RecurrentPort(probed.recurrent_calls)
            self.alterations.on_undo(self._recurrent.release)

    @property
    def num_embeddings(self) -> int:
        """Token ids that the model can read and predict: logits may be wider than the input embedding (padding)."""
        return min(self.vocab_size, len(self._embedding))

    @property
    def _embedding(self) -> Tensor:
        weight: Tensor = self.hf_model.get_input_embeddings().weight  # type: ignore[assignment]
        return weight

    def forward(
        self,
        token_ids: Tensor,
        planned: PlannedBatch,
        logits_indices: Tensor | None,
        model: Function | None = None,
        keep_aux: bool = True,
    ) -> TargetOutput:
        """One pass over a ragged batch.

        Args:
            token_ids: [T] int64; planned: the batch's attention, positions included.
            logits_indices: [R] int64 logits indices, token rows whose logits are computed; None for all.
            model: the model in another form (compiled); default the model itself. It is given two tokens at least, and
                two logits indices: code compiled for any number is compiled again for one and for none, and without
                logits the compiler removes all that nothing reads, the writes of the cache included.
            keep_aux: whether the aux hidden states are kept; without, the batch may be longer than their buffer, and
                `aux_hidden_states` has no rows.

        Raises:
            InvariantError: the batch is longer than their buffer, or the model did not hand them out.
        """
        attend = partial(self.runner.attend, planned)
        positions = planned.metadata.positions if self.long_rope is None else self.rotary_positions(planned.metadata)
        ids = token_ids
        rows = logits_indices
        num_tokens = len(token_ids)
        if model is not None:
            ids = _at_least_two(ids)
            positions = _at_least_two(positions)
            rows = None if rows is None else _at_least_two(rows)
        served = attend if len(ids) == num_tokens else _once(attend)
        recur = None if self.states is None else self.recur(planned)
        kept = num_tokens if keep_aux else 0
        if model is None and self.steps is not None:
            inputs = (ids, positions, *(() if rows is None else (rows,)))
            aux = self._recorder.buffer[:kept]
            live = partial(self._live, ids, positions, rows, kept)
            return TargetOutput(self.steps.launch(live, inputs, attend, aux), aux)
        logits = self.launch(ids, positions, rows, served, self.hf_model if model is None else model, recur, kept)
        count = num_tokens if logits_indices is None else len(logits_indices)
        return TargetOutput(logits[:count], self._recorder.buffer[:kept])

    def _live(
        self, token_ids: Tensor, positions: Tensor, logits_indices: Tensor | None, kept: int, attend: LayerAttend
    ) -> Tensor:
        """`launch` of the model itself."""
        return self.launch(token_ids, positions, logits_indices, attend, self.hf_model, None, kept)

    def check_recordings(self) -> None:
        """Forget recorded steps if the model may have changed since the last call."""
        if self.steps is not None:
            self.steps.check()

    def rotary_positions(self, metadata: CommonAttentionMetadata) -> Tensor:
        """[T] int64 positions of a batch's tokens as the model gets them."""
        own = metadata.extra(RotaryPositions) if self.long_rope is not None else None
        return metadata.positions if own is None else own.positions

    def recur(self, planned: PlannedBatch) -> Recur | None:
        """The function that serves the recurrent calls of a planned batch; None for a target without.

        Raises:
            InvariantError: a batch of a recurrent target has no states.
        """
        if self.states is None:
            return None
        if planned.plans is None:
            return self.states.blank()
        found = self.states.serving(planned.metadata)
        if found is None:
            raise InvariantError("a batch of a recurrent target has no states")
        return found

    def launch(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor | None,
        attend: LayerAttend,
        model: Function,
        recur: Recur | None,
        kept: int | None = None,
    ) -> Tensor:
        """The model with any attention, [R, V] logits; `forward`, and graphs by segments, where it is compiled.

        Args:
            token_ids, positions: [T] int64; logits_indices: [R] int64, see `forward`.
            recur: any recurrences; unused by a target without.
            kept: number of tokens whose aux hidden states are kept; default T.
        """
        kept = len(token_ids) if kept is None else kept
        recurring = nullcontext() if recur is None or self._recurrent is None else self._recurrent.using(recur)
        selection = {}
        if self._selects_rows:
            selection = {"logits_to_keep": 0 if logits_indices is None else logits_indices}
        with self._port.using(attend), recurring, self._recorder.recording(kept, kept > 0):
            output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **selection)
        logits: Tensor = output.logits[0]
        if logits_indices is None or self._selects_rows:
            return logits
        return logits.index_select(0, logits_indices)

    def aux_hidden_states(self, num_tokens: int) -> Tensor:
        """[T, A·Ht] aux hidden states of the last forward; always the same memory."""
        return self._recorder.buffer[:num_tokens]


def placeholders(config: Any) -> dict[int, str]:
    """Token id -> the field that names it, of a configuration and those inside it; {} for a model of text alone."""
    found: dict[int, str] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found |= placeholders(value)
        elif _PLACEHOLDER.fullmatch(name) and isinstance(value, int) and value >= 0:
            found[value] = name
    return found


def _at_least_two(x: Tensor) -> Tensor:
    # The compiler specialises sizes 0 and 1. Logits of the added token are cut off, and `_once` keeps it out of the
    # cache.
    return x if len(x) > 1 else F.pad(x, (0, 2 - len(x)))


def _once(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention of a batch's only token, to which a second was added; only the first is written to the cache."""
    return lambda layer, q, k, v, *sinks: attend(layer, q[:1], k[:1], v[:1], *sinks).repeat(2, 1, 1)


def own_logits(engine: Any, token_ids: Sequence[int]) -> Tensor:
    """[T, V]: logits of the own forward of an engine's target, without cache and head, after each of these tokens.

    Every process of the target's group must call it, see `Group.run`.
    """
    model = engine.target.hf_model
    ids = torch.tensor([list(token_ids)], device=model.device)
    as_generated = evaluating(model, trainable_modules(model))
    with gate_of(model.config).held(), as_generated, torch.inference_mode():
        logits: Tensor = model(ids, use_cache=False).logits[0]
    return logits
