"""Probing a model before it is served, and its placeholder token ids of images, videos and sound: only text is
served."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attention.hf.mixing import MIXING_FUNCTIONS, RecurrentCall, modeling_files
from attention.hf.probe import AttentionCall, probe
from attention.hf.weights import has_quantised
from specdec.errors import UNNAMED_ERRORS, UnsupportedAttentionError, UnsupportedModelError

if TYPE_CHECKING:
    from specdec.wrapped.fp8 import Fp8Layers

_FIELD = re.compile(r"(image|video|audio|speech)_(token|patch)_(id|index)")


def placeholders(config: Any) -> dict[int, str]:
    """Token id -> the field that names it, of a configuration and those inside it; {} for a model of text alone."""
    found: dict[int, str] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found |= placeholders(value)
        elif _FIELD.fullmatch(name) and isinstance(value, int) and value >= 0:
            found[value] = name
    return found


_INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
"""Attention with an indexer, in transformers 5.17: dense up to a length, see `attention.hf.model_specific`."""
_SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"} | _INDEXED_LAYERS
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name by which transformers' modeling files have the attention interface."""
_MASK_READERS = {"alibi": "attention biased by distance"}
"""Configuration fields of models with custom attention code, and their meaning."""


@dataclass(frozen=True)
class TargetProbe:
    """What a probe pass found out about a model, on its device, in its dtype.

    Attributes:
        calls: attention modules and their AttentionSpecs in layer order.
        layers: the decoder layers; without recurrent calls each has as many calls.
        vocab_size: V, width of the logits (padded vocabularies included). selects_rows: see `attention.hf.probe.Probe`.
        recurrent_calls: the calls of recurrences in the order of a forward; () for a model of attention alone.
        fp8: the model's FP8 layers, which run specdec's operators; None for a model without.
    """

    model: PreTrainedModel
    calls: tuple[AttentionCall, ...]
    layers: torch.nn.ModuleList
    vocab_size: int
    selects_rows: bool = True
    recurrent_calls: tuple[RecurrentCall, ...] = ()
    fp8: Fp8Layers | None = None

    @property
    def recurrence_specs(self) -> tuple[Any, ...]:
        """The recurrent calls' requirements on states, see `RecurrentCall`."""
        return tuple(call.spec for call in self.recurrent_calls)


def _fp8_layers(model: PreTrainedModel) -> Fp8Layers | None:
    if not has_quantised(model):
        return None
    from specdec.wrapped.fp8 import fp8_layers

    return fp8_layers(model)


def probe_target(model: PreTrainedModel) -> TargetProbe:
    """Probe a model and refuse it if its results on paged attention would be wrong.

    Raises:
        UnsupportedModelError: state other than the KV cache, unknown attention arguments, layers without attention,
            attention types other than full, sliding, chunked and indexed; FP8 layers without an operator.
    """
    name = type(model).__name__
    fp8 = _fp8_layers(model)
    try:
        found = probe(model)
    except UnsupportedAttentionError as error:
        raise UnsupportedModelError(f"{name} cannot run on the paged cache: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except UNNAMED_ERRORS as error:
        _check_reads_text(model)
        if not _knows_the_interface(model):
            raise UnsupportedModelError(
                f"{name} does not call transformers' attention interface: its modeling file has attention code of its "
                f"own{_likely_reason(model)}"
            ) from error
        raise UnsupportedModelError(
            f"{name} does not run without an attention mask{_likely_reason(model)}: on four tokens with position_ids "
            f"and no mask its forward raises {type(error).__name__}: {error}"
        ) from error
    calls, recurrent = found.calls, found.recurrent_calls
    if recurrent:
        layers = _mixed_layers(model, [*(call.module for call in calls), *(call.module for call in recurrent)])
    else:
        _check_attention_alone(model, calls)
        layers = _decoder_layers(model, calls)
    return TargetProbe(model, calls, layers, found.vocab_size, found.selects_rows, recurrent, fp8)


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a model that gives its last states, after the final norm: see `last_states`.

    It holds the input embedding and no output embedding. transformers' `get_decoder` is that part in most classes; in
    others it is a model with logits (Llama 4; wrappers around one) or the output embedding (ModernBERT's decoder).

    Raises:
        UnsupportedModelError: the model has no such part.
    """
    embedding = model.get_input_embeddings()
    for part in (model.get_decoder(), *model.modules()):
        inside = list(part.modules())
        whole = [each for each in inside if isinstance(each, PreTrainedModel)]
        if part in whole and embedding in inside and all(each.get_output_embeddings() is None for each in whole):
            return part
    raise UnsupportedModelError(
        f"{type(model).__name__} has no part that gives the states its output embedding reads: a head on the target's "
        "last state cannot be served; give a head that reads layers, or draft=None"
    )


def last_states(decoder: torch.nn.Module, output: Any, width: int) -> torch.Tensor:
    """[1, T, width], the last states in the output of a model's decoder (`decoder_of`).

    Raises:
        UnsupportedModelError: the output has none, or they have another width.
    """
    states: torch.Tensor | None = getattr(output, "last_hidden_state", None)
    if states is None or states.shape[-1] != width:
        found = "" if states is None else f", but {list(states.shape)}"
        raise UnsupportedModelError(
            f"{type(decoder).__name__} gives no last hidden states of width {width}{found}: a head on the target's "
            "last state cannot be served; give a head that reads layers, or draft=None"
        )
    return states


def _check_reads_text(model: PreTrainedModel) -> None:
    """Refuse a model whose own forward needs more than text, such as an image with every prompt."""
    ids = torch.zeros((1, 4), dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except UNNAMED_ERRORS as error:
        name = type(model).__name__
        fails = f"{name}'s own forward fails on text" if _reads_text(model) else f"{name} does not read text alone"
        raise UnsupportedModelError(
            f"{fails}: on four tokens {'it' if _reads_text(model) else 'its own forward'} raises "
            f"{type(error).__name__}: {error}"
        ) from error


def _reads_text(model: PreTrainedModel) -> bool:
    """Whether a model reads text, according to transformers' input modalities."""
    kinds = getattr(model, "input_modalities", None) or ("text",)
    return set([kinds] if isinstance(kinds, str) else kinds) == {"text"} and model.main_input_name == "input_ids"


def _knows_the_interface(model: PreTrainedModel) -> bool:
    """Whether any modeling file of the model's uses transformers' attention interface."""
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    return any(_INTERFACE in vars(file) for file in files if file is not None)


def _check_attention_alone(model: PreTrainedModel, calls: tuple[AttentionCall, ...]) -> None:
    """Refuse a model without recurrent calls in which anything but served attention may mix tokens.

    A hybrid class whose configuration has attention layers only is a plain model.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    num_layers = int(config.num_hidden_layers)
    plain = len(calls) == num_layers and bool(modeling_files(list(model.modules())))
    if getattr(model, "_is_stateful", False) and not plain:  # transformers' flag of models with further state
        raise UnsupportedModelError(
            f"{name} keeps state beside its KV cache, and not by functions that specdec can serve "
            f"({', '.join(MIXING_FUNCTIONS)})"
        )
    if len(calls) != num_layers:
        raise UnsupportedModelError(
            f"{name} has {num_layers} layers, but {len(calls)} of them call transformers' attention interface"
        )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if odd:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(odd)}; full, sliding, chunked and indexed attention are supported"
        )


def _likely_reason(model: PreTrainedModel) -> str:
    """The configuration field that makes a model read its attention mask, for messages."""
    config = model.config.get_text_config()
    for name, meaning in _MASK_READERS.items():
        if value := getattr(config, name, None):
            return f" ({meaning}: {name}={value} in its configuration)"
    return ""


def _decoder_layers(model: PreTrainedModel, calls: tuple[AttentionCall, ...]) -> torch.nn.ModuleList:
    """The layers that hold the attention modules in order, each as many (LongCat-Flash: two)."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and len(calls) % len(module) == 0:
            each = len(calls) // len(module)
            holders = (layer for layer in module for _ in range(each))
            if all(any(m is c.module for m in layer.modules()) for layer, c in zip(holders, calls, strict=True)):
                return module
    raise UnsupportedModelError(
        f"{type(model).__name__}: no list of decoder layers holds its attention modules in order"
    )


def _mixed_layers(model: PreTrainedModel, mixers: Sequence[torch.nn.Module]) -> torch.nn.ModuleList:
    """The decoder layers of a model with recurrent ones: a layer may have any number of these modules, or none."""
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            inside = set(module.modules())
            if all(mixer in inside for mixer in mixers):
                return module
    raise UnsupportedModelError(
        f"{type(model).__name__}: no list of {num_layers} decoder layers holds its recurrent and attention modules"
    )
