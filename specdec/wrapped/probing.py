"""What a model is, found out before it is served, by its parts and by a forward; models that cannot be are refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.errors import named_error
from attention.hf.mixing import MIXING_FUNCTIONS, RecurrentCall, modeling_files
from attention.hf.probe import Calls, probe
from attention.hf.weights import has_quantised
from specdec.errors import UNNAMED_ERRORS, InvalidInputError, UnsupportedAttentionError, UnsupportedModelError

if TYPE_CHECKING:
    from specdec.wrapped.quantised_layers import Fp8Layers

_INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
"""Attention with an indexer, in transformers 5.17: dense up to a length, see `attention.hf.model_specific`."""
_SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"} | _INDEXED_LAYERS
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name by which transformers' modeling files have the attention interface."""
_SAME_IN_TRAINING = (nn.Linear, nn.ModuleList, nn.ModuleDict)
"""What is made in training mode and computes the same in both modes."""


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
    calls: Calls
    layers: nn.ModuleList
    vocab_size: int
    selects_rows: bool
    recurrent_calls: tuple[RecurrentCall, ...]
    fp8: Fp8Layers | None

    @property
    def recurrence_specs(self) -> tuple[Any, ...]:
        """The recurrent calls' requirements on states, see `RecurrentCall`."""
        return tuple(call.spec for call in self.recurrent_calls)


def _fp8_layers(model: PreTrainedModel) -> Fp8Layers | None:
    if not has_quantised(model):
        return None
    from specdec.wrapped.quantised_layers import fp8_layers

    return fp8_layers(model)


def check_loaded_target(model: PreTrainedModel) -> None:
    """Check that a loaded model can generate here, whatever its attention.

    Raises:
        UnsupportedModelError: an encoder and decoder, or no output layer over a vocabulary.
        InvalidInputError: weights without values, on several devices, or on a device other than CPU and CUDA; a model
            in training mode.
    """
    name = type(model).__name__
    _check_not_dispatched(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} has an encoder and a decoder; causal language models are supported")
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{name} has no output layer over the vocabulary; load the model as AutoModelForCausalLM"
        )
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in places:
        raise InvalidInputError("the model's weights lie on device 'meta' and have no values; load them first")
    if len(places) > 1:
        raise InvalidInputError(f"the model's weights lie on several devices ({', '.join(places)}); move it to one")
    if model.device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"the model is on {model.device}; CPU and CUDA are supported; use model.to(…)")
    training = ((part, m) for part, m in model.named_modules() if m.training and not isinstance(m, _SAME_IN_TRAINING))
    for part, module in training:
        raise InvalidInputError(
            f"the model is in training mode ({part or type(module).__name__}), where dropout changes its output; call "
            "model.eval()"
        )


def _check_not_dispatched(model: PreTrainedModel) -> None:
    """Check that accelerate moves no parts of a model between devices in each forward (`device_map`, offload).

    Raises:
        InvalidInputError: it does; the message names the hook, and where the parts lie.
    """
    # `_hf_hook` is accelerate's mark of a module that it runs; accelerate itself need not be installed.
    hooked = [(name, m._hf_hook) for name, m in model.named_modules() if getattr(m, "_hf_hook", None) is not None]
    if not hooked:
        return
    name, hook = hooked[0]
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    spread = f", its parts lie on {', '.join(sorted(places))}" if places else ""
    raise InvalidInputError(
        f"the model is run by hooks of accelerate ({type(hook).__name__} on {name or type(model).__name__!r}{spread}): "
        "they move weights or inputs between devices in each forward (device_map with several devices, CPU or disk "
        "offload), which is not supported; load the model onto one device (device_map={'': 0}, or without device_map), "
        "or take the hooks off with accelerate.hooks.remove_hook_from_module(model, recurse=True)"
    )


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
        files = {sys.modules.get(type(module).__module__) for module in model.modules()}
        if not any(_INTERFACE in vars(file) for file in files if file is not None):
            raise UnsupportedModelError(
                f"{name} does not call transformers' attention interface: its modeling file has attention code of its "
                f"own{_likely_reason(model)}"
            ) from error
        raise UnsupportedModelError(
            f"{name} does not run without an attention mask{_likely_reason(model)}: on four tokens with position_ids "
            f"and no mask its forward raises {named_error(error)}"
        ) from error
    calls = found.calls
    recurrent = found.recurrent_calls
    if not recurrent:
        _check_attention_alone(model, calls)
    layers = _decoder_layers(model, calls, recurrent)
    return TargetProbe(model, calls, layers, found.vocab_size, found.selects_rows, recurrent, fp8)


def decoder_of(model: PreTrainedModel) -> nn.Module:
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


def last_states(decoder: nn.Module, output: Any, width: int) -> Tensor:
    """[1, T, width], the last states in the output of a model's decoder (`decoder_of`).

    Raises:
        UnsupportedModelError: the output has none, or they have another width.
    """
    states: Tensor | None = getattr(output, "last_hidden_state", None)
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
        kinds = getattr(model, "input_modalities", None) or "text"  # transformers': a name or several
        text_alone = (
            set([kinds] if isinstance(kinds, str) else kinds) == {"text"} and model.main_input_name == "input_ids"
        )
        reason = "'s own forward fails on text" if text_alone else " does not read text alone"
        raise UnsupportedModelError(
            f"{type(model).__name__}{reason}: on four tokens it raises {named_error(error)}"
        ) from error


def _check_attention_alone(model: PreTrainedModel, calls: Calls) -> None:
    """Refuse a model without recurrent calls in which anything but served attention may mix tokens.

    A hybrid class whose configuration has attention layers only is a plain model.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
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
    """The configuration field that makes a model read its attention mask, for messages; "" where none is known."""
    alibi = getattr(model.config.get_text_config(), "alibi", None)
    return f" (attention biased by distance: alibi={alibi} in its configuration)" if alibi else ""


def _decoder_layers(model: PreTrainedModel, calls: Calls, recurrent: tuple[RecurrentCall, ...]) -> nn.ModuleList:
    """The layers that hold the attention modules in order, each as many (LongCat-Flash: two); of a model with recurrent
    ones, a layer may have any number of these and of attention modules, or none."""
    mixers = {*(call.module for call in calls), *(call.module for call in recurrent)}
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if recurrent:
            if len(module) == num_layers and mixers <= set(module.modules()):
                return module
        elif len(calls) % len(module) == 0:
            holders = (layer for layer in module for _ in range(len(calls) // len(module)))
            if all(any(m is c.module for m in layer.modules()) for layer, c in zip(holders, calls, strict=True)):
                return module
    raise UnsupportedModelError(
        f"{type(model).__name__}: no list of {num_layers} decoder layers holds its attention and recurrent modules in "
        "order"
    )
