"""Load and save block-parallel heads, strictly, with the source of every choice; or resolve one by its own files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attention.backends.limits import dtype_name
from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, TargetFacts
from drafters.block.formats import REFINED, flattened, format_of, resolve_block
from drafters.block.head import BlockParallelHead
from drafters.block.spec import BlockSpec
from drafters.checkpoints.config_fields import HeadReport, lookup, read, rope_to_config
from drafters.checkpoints.layer_fields import EMBEDDING, LM_HEAD
from drafters.checkpoints.layouts import strip_prefixes
from drafters.checkpoints.opened_head import OpenedHead
from drafters.checkpoints.tensor_files import (
    CheckpointPath,
    Json,
    Names,
    locate,
    naming,
    open_folder,
    read_json,
    write_folder,
)
from drafters.eagle3.checkpoint import maps_of
from drafters.eagle3.export import SPECULATORS_VERSION, Verifier, made, speculators_config
from drafters.eagle3.layout import layer_sizes
from drafters.errors import HeadLoadError, HeadMismatchError

_TRANSFORMERS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def load_block(
    path: CheckpointPath, target: TargetFacts, dtype: torch.dtype, device: torch.device | str
) -> BlockParallelHead:
    """Load a head for a target, whose tensors are shared, not copied, ready for inference.

    Raises:
        HeadLoadError: files are missing, tensors are missing, unknown, of another shape or not finite, the class is
            not supported, or the configuration has unknown keys, contradicts itself or the tensors.
        HeadMismatchError: the head was made for another target.
    """
    return _open(path, target).loaded(dtype, device)


def describe_block(path: CheckpointPath) -> HeadReport:
    """Resolve a head by its own files. Raises the errors of `load_block`, but for what only values show."""
    return _open(path, _target_of_files(path)).report


def fresh_block(spec: BlockSpec, target: TargetFacts, seed: int) -> BlockParallelHead:
    """A head with random float32 weights on the target's device, which shares the target's embedding and lm_head.

    Raises HeadMismatchError: spec and target do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _new_head(spec, target, None, "cpu").to(target.embedding.device)


def save_block(head: BlockParallelHead, folder: CheckpointPath, num_target_layers: int, num_anchors: int) -> Path:
    """Write config.json and model.safetensors; returns the folder.

    A plain head that fills in has z-lab's layout, without the target's embedding and lm_head. Others have DeepSpec's,
    with copies of both, and say how many anchors they were trained with.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = head.norm.weight.dtype
    weights = head.state_dict()
    if _is_deepspec(head.spec):
        weights = {EMBEDDING: head.target_embedding, LM_HEAD: head.target_lm_head, **weights}
    # Clones: safetensors stores no two tensors that share memory, as those of a tied target do.
    tensors = {name: t.detach().to("cpu", stored).contiguous().clone() for name, t in weights.items() if t is not None}
    config = config_of(head.spec, num_target_layers, num_anchors) | {"dtype": dtype_name(stored)}
    return write_folder(folder, config, tensors)


def export_block(
    head: BlockParallelHead, folder: Path, layout: str, target: TargetFacts, verifier: Verifier, stored: torch.dtype
) -> Path:
    """Write a head in another project's layout, without copies of its target's tensors; returns the folder.

    The files are resolved again before they are written, which shows what the layout has no place for. Temperatures of
    a confidence head, specdec's own key, are left out.

    Args:
        layout: "z-lab", which SGLang reads, too, or "speculators", which vLLM reads.
        target: of the head. verifier: the same as a speculators configuration names it. stored: dtype of the weights.

    Raises:
        InvalidInputError: the layout cannot express the head, or the folder cannot be written.
    """
    weights = {name: t.to("cpu", stored).contiguous() for name, t in head.state_dict().items()}
    for name, theirs in ((EMBEDDING, target.embedding), (LM_HEAD, target.lm_head)):
        if name in weights and torch.equal(weights[name], theirs[: head.spec.vocab_size].to(stored)):
            del weights[name]
    spec = replace(
        head.spec, own_embed=EMBEDDING in weights, own_lm_head=LM_HEAD in weights, confidence_temperatures=()
    )
    is_whole, is_speculators = spec.draft_vocab_size == spec.vocab_size, layout == "speculators"
    config = _speculators_config(spec, verifier) if is_speculators else config_of(spec, target.num_layers, 0)
    try:
        again, _ = resolve_block(config, {name: tuple(t.shape) for name, t in weights.items()}, target)
        odd = [f"{name} = {value!r}" for name, value in vars(spec).items() if getattr(again, name) != value]
    except (HeadLoadError, HeadMismatchError) as error:
        odd = [str(error)]
    no_place = {
        "an embedding unlike its target's": spec.own_embed,
        "an lm_head unlike its target's": spec.own_lm_head and is_whole,
        "a Markov head or slots of DSpark": not is_speculators and _is_deepspec(spec),
    }
    odd += [f"it has {what}" for what, is_there in no_place.items() if is_there]
    if odd:
        raise InvalidInputError(f"this head cannot be written in the {layout} layout: {'; '.join(odd)}")
    tensors = {name.replace("codebook.weight", "codebook"): t for name, t in weights.items()}
    config["dtype"] = dtype_name(stored)
    return write_folder(made(folder), config, tensors if is_whole else tensors | maps_of(head))


def config_of(spec: BlockSpec, num_target_layers: int, num_anchors: int) -> Json:
    """config.json in z-lab's layout, or DeepSpec's of a trained head, without the dtype of the weights."""
    own = {
        "target_layer_ids": [num_target_layers - 1 if b == FINAL_NORM else b - 1 for b in spec.aux_layers],
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.slots == "anchor-first",
    }
    scales = {
        "input_embedding_scale": spec.embedding_scale,
        "output_multiplier": spec.logit_scale,
        "final_logit_softcapping": spec.logit_softcap,
    }
    if _is_deepspec(spec):
        name, own = "Qwen3DSparkModel", {**own, "num_anchors": num_anchors, **_chain(spec)}
        own["confidence_temperatures"] = spec.confidence_temperatures or None
    else:
        name = "DFlash2DraftModel" if spec.selector_rank else "DFlashDraftModel"
        own = {"dflash_config": {**own, **scales, **_refinements(spec)}}
    return {
        "architectures": [name],
        **_layer_config(spec),
        "num_target_layers": num_target_layers,
        "block_size": spec.block_size,
        "is_causal": None if spec.causal_layers == spec.windowed_layers else bool(spec.causal_layers),
        "sliding_attention_causal": bool(spec.causal_layers),
        **own,
    }


def _speculators_config(spec: BlockSpec, verifier: Verifier) -> Json:
    is_dspark = spec.confidence or _is_deepspec(spec)
    name = "DFlash2" if spec.selector_rank else "DSpark" if is_dspark else "DFlash"
    return {
        "architectures": [f"{name}DraftModel"],
        "speculators_model_type": name.lower(),
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": speculators_config(name.lower(), verifier, spec.block_size - spec.first_slot),
        "draft_vocab_size": spec.draft_vocab_size,
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "aux_hidden_state_layer_ids": list(spec.aux_layers),
        "sample_from_anchor": spec.slots == "anchor-first",
        "sliding_window_non_causal": not spec.causal_layers,
        **(_chain(spec) if name == "DSpark" else _refinements(spec)),
        "transformer_layer_config": _layer_config(spec),
    }


def _layer_config(spec: BlockSpec) -> Json:
    """The layers, as every layout has them."""
    kinds = ("sliding_attention" if i in spec.windowed_layers else "full_attention" for i in range(spec.num_layers))
    return {
        "model_type": "qwen3",
        **layer_sizes(spec),
        "attention_bias": spec.qkv_bias,
        "mlp_bias": False,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "layer_types": list(kinds),
        "sliding_window": spec.window,
        "use_sliding_window": bool(spec.windowed_layers),
        **rope_to_config(spec.rope),
    }


def _refinements(spec: BlockSpec) -> Json:
    return {key: getattr(spec, key) for key in REFINED} if spec.selector_rank else {}


def _chain(spec: BlockSpec) -> Json:
    return {
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.markov or "vanilla",
        "enable_confidence_head": spec.confidence is not None,
        "confidence_head_with_markov": spec.confidence == "outputs and tokens",
    }


def _open(path: CheckpointPath, target: TargetFacts) -> OpenedHead[BlockSpec, BlockParallelHead]:
    folder_path = locate(path)
    with naming(folder_path):
        written = format_of(read_json(folder_path / "config.json"))  # first: others keep weights in other files
        folder = open_folder(folder_path)
        names = _of_modules(strip_prefixes(folder.tensors))
        spec, fields = resolve_block(folder.config, folder.shapes(names), target)
        build = partial(_new_head, spec, target)
        opened = OpenedHead(folder, f"{written.name} layout", names, spec, fields, build)
        opened.check()
    return opened


def _of_modules(names: Names) -> Names:
    """Names with those of codebooks as of embeddings, whose `.weight` published files leave out, and transformers' own
    as of the others."""
    bare = {name: f"{name}.weight" for name in names if name.endswith("_codebook") and f"{name}.weight" not in names}
    return {(_TRANSFORMERS | bare).get(name, name): full for name, full in names.items()}


def _new_head(spec: BlockSpec, target: TargetFacts, d2t: Tensor | None, device: str = "meta") -> BlockParallelHead:
    """The head with torch's own weights, sharing the target's tensors (a padded embedding is cut, not copied)."""
    embedding, lm_head = target.embedding[: spec.vocab_size], target.lm_head[: spec.draft_vocab_size]
    return BlockParallelHead(spec, embedding, lm_head, d2t, torch.device(device))


def _target_of_files(path: CheckpointPath) -> TargetFacts:
    """The target that the files imply, with tensors of zeros that take no memory. Raises HeadLoadError: they do not."""
    folder = locate(path)
    with naming(folder):
        config = flattened(read_json(folder / "config.json"))
        if lookup(config, "vocab_size") is None:
            raise HeadLoadError("config.json has no vocab_size, as that of transformers' class: give the head's target")
        vocab, hidden = (read(config, key, int).value for key in ("vocab_size", "hidden_size"))
        ids = lookup(config, "target_layer_ids") or lookup(config, "aux_hidden_state_layer_ids")
        least = max(ids) + 2 if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None
        layers = read(config, "num_target_layers", int, default=least).value
    zeros = torch.zeros(1, 1).expand(vocab, hidden)
    return TargetFacts(hidden, vocab, layers, zeros, zeros)


def _is_deepspec(spec: BlockSpec) -> bool:
    return spec.markov is not None or spec.slots == "anchor-first"
