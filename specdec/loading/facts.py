"""Facts about a loaded model, all options resolved: for provenance, `specdec inspect` and the statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attention.backends.limits import dtype_name
from attention.cache.kv_cache import bytes_per_token
from attention.groups import GroupedRunner
from attention.hf.model_specific import dense_up_to
from attention.hf.weights import is_quantised, model_bytes, num_elements
from attention.runner import GroupRunner
from specdec.loading.assembly import builds_of
from specdec.loading.cache_format import scales_in_words
from specdec.loading.quantisation import kind_in_words, quantisation_of
from specdec.options.generation_config import named, sampling_of_model, unsupported
from specdec.values import Json, without
from specdec.wrapped.changes import adapter_layers, adapter_states, in_words
from specdec.wrapped.fingerprint import tokens_fingerprint
from specdec.wrapped.linears import linears_in_words

if TYPE_CHECKING:
    from attention.recurrence.runner import StateRunner
    from specdec.config import EngineConfig
    from specdec.execution.base import GraphReport


_ROUNDED = (
    "rounded at every call: a value between two steps goes to either, so tokens whose logits are close may come out "
    "otherwise in another batch, as in half precision"
)
_SPARSE = "dense up to index_topk={:,} tokens, where its indexer would choose all keys"


def facts_of(model: Any) -> Json:
    """Resolved facts of a SpeculativeModel: model, head, attention, caches, graphs and engine."""
    head, runners, checkpoint = model.head, model.runners, model.checkpoint
    target, hf_model = model.target, model.hf_model
    hybrid = target.states is not None
    captured = getattr(model.engine.executor, "report", None)
    spent = model.steps
    dense = dense_up_to(hf_model)
    layers = target.runner.layer_numbers if isinstance(target.runner, GroupedRunner) else {}
    return {
        "target": getattr(checkpoint, "gguf_file", None) or hf_model.name_or_path or type(hf_model).__name__,
        "revision": getattr(checkpoint, "revision", None),
        "trust_remote_code": getattr(checkpoint, "trust_remote_code", False),
        "adapter": _adapter(model),
        "architecture": type(hf_model).__name__,
        "parameters": sum(num_elements(name, p) for name, p in hf_model.named_parameters()),
        "weights_bytes": model_bytes(hf_model),
        "quantisation": _quantisation(model),
        "experts": _experts(model),
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "refused_tokens": {name: token_id for token_id, name in target.placeholders.items()} or None,
        "dtype": dtype_name(model.dtype),
        "device": str(model.device),
        "backend": model.backend_name,
        "linears": linears_in_words(hf_model, model.plain_linears),
        "recorded_steps": None if target.steps is None else str(target.steps),
        "attention": {runner.group.name: "; ".join(runner.routes) for runner in runners},
        "kv_cache": {runner.group.name: _cache(runner, layers.get(runner.group.name), hybrid) for runner in runners},
        "kv_cache_scales": scales_in_words(checkpoint, runners[0].group.format.source),
        "recurrent": None if target.states is None else _recurrent(target.states),
        "long_rope": _long_rope(model),
        "sparse_attention": None if dense is None else _SPARSE.format(dense),
        "prefix_caching": model.prefix_caching,
        "cascade_attention": model.cascade_attention,
        "self_test": str(model.self_test),
        "self_test_error": model.self_test_error,
        "twin": str(model.twin),
        **_head(head, model.device),
        "generation_config": _own_config(model),
        "engine": _sizes(model.config),
        "tensor_parallel": model.group.facts(),
        "graphs": {"state": model.graphs} | ({} if captured is None else _graphs(captured)),
        "kernels": {build.name: build.state for build in builds_of(model.runners)},
        "start": {name: round(taken, 2) for name, taken in (*spent.items(), ("in all", sum(spent.values())))},
    }


def _head(head: Any, device: Any) -> Json:
    if head is None:
        return dict.fromkeys(("head", "aux_layers", "draft_vocab_size", "draft_rows_bytes", "draft_tokens"))
    rows = getattr(head, "draft_rows", None)
    return {
        "head": type(head).__name__,
        "aux_layers": list(head.aux_layers),
        "draft_vocab_size": head.draft_vocab_size,
        "draft_rows_bytes": None if rows is None else rows.nbytes,
        "draft_tokens": tokens_fingerprint(head, device),
    }


def _adapter(model: Any) -> str | None:
    """The loaded adapter and whether it runs live, or the adapters of the given model; None for none."""
    live = in_words(adapter_states(adapter_layers(model.hf_model)))
    named = getattr(model.checkpoint, "adapter", None)
    if named is None:
        return f"live: {live}" if live else None
    return f"{named}, {'live' if live else 'merged'}"


def _quantisation(model: Any) -> Json | None:
    """How the target's weights are stored and run, and which layers; None for a target that is not quantised."""
    target = model.hf_model
    found = getattr(model.checkpoint, "quantisation", None) or quantisation_of(target, None)
    if found is None:
        return None
    from specdec.selftest.quantised import rounds_activations

    layers = Counter(kind_in_words(layer) for layer in target.modules() if is_quantised(layer))
    runs = "as stored"
    fp8 = model.target.fp8
    if found.dequantised:
        runs = f"dequantised in {dtype_name(target.dtype)}: {found.dequantised}"
    elif fp8 is not None and model.device.type == "cpu":
        runs = "multiplied out in float32 in every matmul"
    return {
        "method": found.method if fp8 is None else "fp8",
        "scheme": (found.scheme or None) if fp8 is None else fp8.scheme.in_words,
        "runs": runs,
        "layers": ", ".join(f"{count} {kind}" for kind, count in layers.items()) or None,
        "activations": _ROUNDED if rounds_activations(target) else "not rounded",
    }


def _experts(model: Any) -> dict[str, str] | None:
    """What serves the layers with experts, and what their weights take; None for a model without."""
    served: dict[str, list[int]] = {}
    for name, mixture in model.hf_model.named_modules():
        if name.endswith(".experts") and (hasattr(mixture, "down_proj") or hasattr(mixture, "down_proj_blocks")):
            from specdec.ops.mixtures.choice import form_in_words

            packed = hasattr(mixture, "down_proj_blocks") or hasattr(mixture, "down_proj_scale_inv")
            form = form_in_words(mixture) if packed or model.graphs == "on" else "transformers' own form"
            served.setdefault(form, []).append(sum(p.nbytes for p in mixture.parameters()))
    return {f: f"{len(b)} layers, {sum(b) / 2**30:.3g} GiB" for f, b in served.items()} or None


def _own_config(model: Any) -> str:
    """The model's own generation_config: the defaults of calls, fields that are ignored, or why calls are refused."""
    if (config := model.hf_model.generation_config) is None:
        return model.generation_config_use
    odd = unsupported(config)
    applied = sampling_of_model(model)
    if model.generation_config_use == "ignore":
        return f"ignore (switched off: {named(odd | applied) or 'nothing'})"
    if odd:
        return f"model (requests are refused: {named(odd)})"
    return f"model (applied: {named(applied)})" if applied else "model"


def _cache(runner: GroupRunner, layers: Sequence[int] | None, hybrid: bool) -> str:
    """layers: their numbers in the model, where it has several groups; of a hybrid model among those that attend."""
    if not runner.layers:
        return "none: no layer attends"
    group = runner.group
    dtype = runner.layers[0].keys.dtype
    tokens = (group.num_pages - 1) * group.page_size
    size = tokens * bytes_per_token(group.attention_specs, dtype) / 2**30
    own = "" if layers is None else f"{'attention ' if hybrid else ''}layers {','.join(map(str, layers))}: "
    return f"{own}{tokens:,} tokens in {dtype_name(dtype)}, {group.layout} pages, {size:.3g} GiB"


def _long_rope(model: Any) -> str | None:
    """The length from which a longrope model's requests have long factors; None for other models."""
    rule = model.target.long_rope
    if rule is None:
        return None
    again = ", a request that passes it is read again" if rule.rereads else ""
    return f"short factors up to {rule.original:,} tokens, long ones beyond{again}"


def _sizes(config: EngineConfig) -> Json:
    found = vars(config) | {"fold_rule": None, "long_rope": None}
    for extra in config.extras:
        found |= extra.facts()
    del found["extras"]
    found["windowed"] = tuple((str(pool.reach), pool.num_pages) for pool in config.windowed)
    return found


def _recurrent(states: StateRunner) -> Json:
    """What a target's recurrent layers are, what computes them, and what a row's states take."""
    group = states.group
    return {
        "calls": dict(Counter(spec.kind for spec in group.specs)),
        "kernel": states.functions.name,
        "state_dtype": dtype_name(group.state_dtype),
        "row_bytes": group.bytes_per_row(states.dtype),
        "GiB": round(group.num_bytes(states.dtype) / 2**30, 3),
    }


def _graphs(report: GraphReport) -> Json:
    """A capture's report with its memory in GiB."""
    sizes = {"GiB": round(report.bytes / 2**30, 3), "seconds": round(report.seconds, 1)}
    return without(vars(report), ("bytes",)) | sizes
