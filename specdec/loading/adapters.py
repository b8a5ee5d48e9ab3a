"""Adapters of peft: a PeftModel, an adapter's folder, or a base with an adapter -> the model that computes both.

What runs is the transformers model inside of a PeftModel, whose layers peft has replaced by its own: those add the
adapter's part to each layer's output ("live"), or their weights hold it ("merged"). peft is imported only here, and
only for a target with an adapter.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from drafters.checkpoints.config_fields import Config
from drafters.checkpoints.tensor_files import read_json
from specdec.errors import ModelLoadError, UnsupportedModelError
from specdec.interrupts import interrupt_in
from specdec.loading.checkpoint import Adapter, Checkpoint, find_checkpoint
from specdec.loading.load_errors import loading_named
from specdec.loading.names import ModelName
from specdec.options.kinds import OrAuto
from specdec.user_warnings import warn_user
from specdec.values import short, wrong

CONFIG = "adapter_config.json"
KINDS = frozenset(
    (
        *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA", "VBLORA", "LN_TUNING"),
        *("RANDLORA", "SHIRA", "C3A", "MISS", "ROAD", "TRAINABLE_TOKENS", "HIRA", "DELORA", "WAVEFT"),
    )
)
"""peft_types that change what layers compute, token by token. Each was compared with its PeftModel's own generate."""
_INPUTS = frozenset({"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT"})
_CACHE = frozenset({"PREFIX_TUNING", "CARTRIDGE"})
_SHARED = ("vblora_vector_bank",)
"""Parameters that several layers share; a file has them once."""
_WEIGHTS = (".safetensors", ".bin")
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
"""A folder of the hub's cache, by its commit."""


def unwrapped(target: Any) -> Any:
    """The transformers model inside of a PeftModel, unchanged and unmerged; any other target itself.

    Raises:
        UnsupportedModelError: an adapter of a kind that changes inputs or cache.
    """
    peft: Any = sys.modules.get("peft")  # not imported: then the target cannot be an object of its classes
    if peft is None or not isinstance(target, peft.PeftModel):
        return target
    check_kinds(type(target).__name__, target.peft_config.values())
    return target.get_base_model()


def check_kinds(name: str, configs: Iterable[Any]) -> None:
    """Check that adapters are computed by the layers alone. configs: peft's, or adapter_config.json as read.

    Raises:
        UnsupportedModelError: an adapter of another kind, which the message names.
    """
    for config in configs:
        values: Config = config if isinstance(config, Mapping) else vars(config)
        kind = str(getattr(values.get("peft_type"), "value", values.get("peft_type")))
        if kind in _INPUTS:
            reason = "puts trained vectors before the prompt, which changes the model's inputs"
        elif kind in _CACHE:
            reason = "puts trained keys and values into the model's cache"
        elif values.get("alora_invocation_tokens"):
            reason = "is switched on by tokens of the prompt (alora_invocation_tokens)"
        elif kind not in KINDS:
            reason = f"is none of those that specdec serves: {', '.join(sorted(KINDS))}"
        else:
            continue
        raise UnsupportedModelError(f"{name}: an adapter of peft_type {kind} {reason}; it is not supported")


def with_adapter(checkpoint: Checkpoint, adapter: ModelName | None, merge: OrAuto) -> Checkpoint:
    """Where a target is read from, with the adapter (folder or hub name, or None) that is to be applied to it.

    The target may be an adapter itself, whose configuration names its base. merge: see the load option merge_adapter.

    Raises:
        ModelLoadError: an adapter that is missing, damaged or names no base.
        InvalidInputError: an adapter for a target that is an adapter itself, or `merge` without an adapter.
        UnsupportedModelError: see `check_kinds`.
    """
    own = _config(checkpoint, "the target model")
    if adapter is not None:
        if own is not None:
            raise wrong(
                "adapter",
                str(adapter),
                f"the target {checkpoint.name!r} is an adapter itself; give its base model as the target",
            )
        place = find_checkpoint(adapter, what="the adapter")
        config = _config(place, "the adapter")
        if config is None:
            raise ModelLoadError(f"cannot load the adapter {place.name!r}: it has no {CONFIG}")
        found = _adapter(place, config, merge)
        # Apart from owners and folders; a base without a name is not compared.
        names = [Path(model).name.lower() for model in (found.base, checkpoint.name)]
        if all(names) and not any(map(_SNAPSHOT.fullmatch, names)) and names[0] != names[1]:
            warn_user(
                f"the adapter {place.name!r} was trained on {found.base!r} (base_model_name_or_path in its {CONFIG}), "
                f"the target is {checkpoint.name!r}: where the sizes are the same, nothing else tells whether it fits"
            )
        return replace(checkpoint, adapter=found)
    if own is None:
        if merge != "auto":
            raise wrong("merge_adapter", merge, "there is no adapter; give adapter=…, or leave it out")
        return checkpoint
    found = _adapter(checkpoint, own, merge)
    if not found.base:
        raise ModelLoadError(
            f"cannot load the target model {checkpoint.name!r}: it is an adapter, and its {CONFIG} names no base model "
            f"(base_model_name_or_path); give the base as the target and adapter={checkpoint.name!r}"
        )
    base = find_checkpoint(
        found.base, own.get("revision"), checkpoint.trust_remote_code, what=f"the base model of {checkpoint.name!r},"
    )
    return replace(base, adapter=found)


def _adapter(place: Checkpoint, config: Config, merge: OrAuto) -> Adapter:
    check_kinds(place.name, [config])
    base = config.get("base_model_name_or_path")
    return Adapter(place.name, place, str(config["peft_type"]), base if isinstance(base, str) else "", merge)


def _config(checkpoint: Checkpoint, what: str) -> Config | None:
    """adapter_config.json of a folder or a hub model; None where it has none.

    Raises:
        ModelLoadError: it is damaged, or lies in one folder with a whole model.
    """
    try:
        file = find_adapter_config_file(
            checkpoint.path, revision=checkpoint.revision, local_files_only=checkpoint.local_files_only
        )
    except OSError as error:
        if interrupt_in(error) is not None:
            raise
        return None  # no such model: reported where it is loaded
    if file is None:
        return None
    names = os.listdir(checkpoint.path) if checkpoint.is_folder else []
    weights = [name for name in names if name.endswith(_WEIGHTS) and not name.startswith("adapter_model")]
    with loading_named(checkpoint, what):
        if weights and "config.json" in names:
            raise ModelLoadError(
                f"the folder holds a model ({sorted(weights)[0]}) and an adapter ({CONFIG}); what is meant? Put the "
                "adapter into a folder of its own, and give that as adapter=…, or merge it with peft's "
                "merge_and_unload() and save that"
            )
        config = read_json(Path(file))
        if not isinstance(config.get("peft_type"), str):
            raise ModelLoadError(f"{file} has no peft_type; it is no adapter of peft")
    return config


def applied(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The model with an adapter, merged or live. It is changed in place, so it must have been loaded for this purpose.

    Raises:
        ModelLoadError: peft is missing or cannot apply it; tensors of the adapter are missing, of modules that the
            model does not have, or of another vocabulary; it cannot be merged.
    """
    place = adapter.checkpoint
    try:
        peft: Any = import_module("peft")
    except ImportError as error:
        raise ModelLoadError(
            f"cannot load the adapter {adapter.name!r}: the package peft is needed ({error}); pip install "
            '"specdec-hf[peft]"'
        ) from error
    quantised = getattr(model, "hf_quantizer", None) is not None
    merge = not quantised if adapter.merge == "auto" else adapter.merge
    if merge and quantised:
        raise ModelLoadError(
            f"cannot merge the adapter {adapter.name!r}: the target's weights are quantised, and merged ones would be "
            "rounded again; give merge_adapter=False"
        )
    where = {} if place.revision is None else {"revision": place.revision}
    with loading_named(place, "the adapter"):
        config = peft.PeftConfig.from_pretrained(place.path, **where)
        # Else peft would make the adapter's weights trainable.
        config.inference_mode = True
        _check_vocabulary(model, peft.load_peft_weights(place.path, device="cpu", **where))
        wrapped = peft.PeftModel(model, config)
        found = wrapped.load_adapter(place.path, "default", torch_device="cpu", **where)
        missing = [key for key in found.missing_keys if not any(part in key for part in _SHARED)]
        problems = (
            (missing, "tensors are missing from it"),
            (sorted(found.unexpected_keys), "of its tensors belong to modules that the model does not have"),
        )
        if odd := [f"{len(keys)} {what} ({short(keys)})" for keys, what in problems if keys]:
            raise ModelLoadError(f"{'; '.join(odd)}; is it for another base model?")
    wrapped.eval()
    if merge and (shared := _of_shared_weights(model)):
        if adapter.merge is True:
            raise ModelLoadError(
                f"cannot merge the adapter {adapter.name!r}: {short(shared)} has a weight that another module uses too "
                "(tied embeddings), and merging would change both; give merge_adapter=False"
            )
        merge = False
    return _merged(wrapped, adapter) if merge else wrapped.get_base_model()


def _check_vocabulary(model: PreTrainedModel, tensors: Config) -> None:
    """Check that an adapter's embeddings have the base's number of tokens: tokens may have been added before training.

    Raises:
        ModelLoadError: they have another number; the message explains how to load such an adapter.
    """
    embedding: Any = model.get_input_embeddings()
    own = next(re.escape(name) for name, module in model.named_modules() if module is embedding)
    whole = re.compile(rf"\.{own}(\.base_layer|\.original_module|\.modules_to_save(\.\w+)?)?\.weight$")
    rows = {len(tensor) for name, tensor in tensors.items() if whole.search(name)}
    if rows and len(embedding.weight) not in rows:
        raise ModelLoadError(
            f"it has embeddings of {max(rows)} tokens, and the base model {len(embedding.weight)}: tokens were added "
            "before it was trained. Load the base with transformers, call its "
            f"resize_token_embeddings({max(rows)}), and give peft.PeftModel.from_pretrained(base, adapter) as the "
            "target"
        )


def _of_shared_weights(model: PreTrainedModel) -> list[str]:
    """Layers with an adapter whose own weight another module holds as well, by name.

    peft merges an adapter into the weight itself. Merging into an lm_head would also change the embedding tied to it,
    and adapters of both would be added twice. Trained tokens are separate rows, which peft keeps equal in both.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    users = Counter(id(p) for m in model.modules() for p in vars(m)["_parameters"].values() if p is not None)
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer) and not isinstance(layer, TrainableTokensLayer)
        if any(users[id(p)] > 1 for p in layer.get_base_layer().parameters(recurse=False))
    ]


def _merged(wrapped: Any, adapter: Adapter) -> PreTrainedModel:
    try:
        model: PreTrainedModel = wrapped.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        raise ModelLoadError(
            f"cannot merge the adapter {adapter.name!r} ({adapter.kind}): {error}; give merge_adapter=False"
        ) from error
    return model.eval()
