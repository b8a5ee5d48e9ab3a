"""Which family a checkpoint belongs to, by its tensor names (config.json's `architectures` is not trusted)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from attention.toml_tables import read_tables
from drafters.checkpoints.config_fields import Config, Shapes, lookup
from drafters.checkpoints.tensor_files import CheckpointFolder, CheckpointPath, locate, open_folder, read_json
from drafters.errors import HeadLoadError

PREFIXES = ("model.", "draft_model.", "module.")
"""Wrappers that exporters leave before the names."""


_WHOLE_MODEL = {"embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight"}
_WHOLE_CLASSES = ("ForCausalLM", "LMHeadModel")
_WHOLE_EMBEDDINGS = ("wte.weight", "embed_in.weight", "decoder.embed_tokens.weight", "word_embeddings.weight")
"""Names of other models' embeddings."""


class Layout(Enum):
    """Checkpoint families; the value is their name in messages."""

    EAGLE3 = "EAGLE-3"
    EAGLE3_MLA = "EAGLE-3 with multi-head latent attention (kv_a_proj_with_mqa)"
    EAGLE3_MOE = "EAGLE-3 with a mixture of experts (mlp.experts)"
    EAGLE3_GEMMA = "DeepSpec's EAGLE-3 of Gemma 4 layers (Gemma4Eagle3Model)"
    EAGLE1 = "EAGLE-1/2 (fc over [embedding, hidden], plain layers)"
    PEAGLE = "P-EAGLE (mask_hidden)"
    SPECULATORS = "speculators"
    DFLASH = "DFlash (block diffusion; dflash_config)"
    DSPARK = "DSpark (dspark_config)"
    DFLASH2 = "DFlash2 (a selector and convolutions over the block)"
    LAGUNA = "Laguna's DFlash (gated layers)"
    JETSPEC = "JetSpec"
    LILICORR = "LiLiCorr"
    FLASHMAP = "FlashMap"
    HSPEC = "H-Spec"
    EAGLE4 = "EAGLE-4"
    MEDUSA = "Medusa (independent heads; medusa_num_heads)"
    HYDRA = "Hydra (hydra_num_heads)"
    MLP_SPECULATOR = "MLP speculator (n_predict)"
    PARALLEL = "EAGLE-3 with parallel draft heads (parallel_draft_heads)"
    GEMMA_ASSISTANT = "Gemma 4 assistant"
    MTP_NEMOTRON = "Nemotron-H MTP (mtp.layers.*.mixer)"
    MTP_QWEN = "Qwen-style MTP (mtp.*)"
    MTP_DEEPSEEK = "DeepSeek-style MTP (*.eh_proj)"
    MTP_MIMO = "MiMo-style MTP (mtp_layers.*)"
    MTP_ERNIE = "Ernie-style MTP (mtp_linear_proj)"
    MTP_DSPARK = "DSpark inside a target's checkpoint (as DeepSeek-V4-0731, Mistral Large 4), no multi-token prediction"
    MTP_OTHER = "multi-token prediction of another kind (as LongCat-Flash, MiMo-V2, Hunyuan V4, DeepSeek-V4, Inkling)"
    CAUSAL_LM = "a causal language model"
    UNKNOWN = "unknown"


def strip_prefixes(names: Iterable[str]) -> dict[str, str]:
    """Map names without their wrapper prefixes to the names in the files.

    Raises:
        HeadLoadError: two names differ only by a prefix.
    """
    stripped: dict[str, str] = {}
    for name in names:
        short = name
        while short.startswith(PREFIXES):
            short = short.split(".", 1)[1]
        if short in stripped:
            raise HeadLoadError(f"tensors {stripped[short]} and {name} are the same one under two prefixes")
        stripped[short] = name
    return stripped


def detect(config: Config, shapes: Shapes) -> Layout:
    """A checkpoint's family, by its config.json and tensor shapes by name, wrapper prefixes stripped."""
    by_config = detect_by_config(config)
    if by_config is not None:
        return by_config
    for marker, layout in _MARKERS:
        if any(marker in f".{name}" for name in shapes):
            return layout
    found = _detect_eagle(config, shapes)
    return Layout.CAUSAL_LM if found is Layout.UNKNOWN and _is_whole(config, shapes) else found


def layout_of(path: CheckpointPath) -> Layout:
    """The family of a checkpoint, by config.json alone where that names it.

    Raises:
        HeadLoadError: the folder or hub model cannot be read.
    """
    # First, because some kinds keep their weights in files that open_folder does not know (Medusa: medusa_lm_head.pt).
    by_config = detect_by_config(read_json(locate(path) / "config.json"))
    if by_config is not None:
        return by_config
    return layout_of_folder(open_folder(path))


def layout_of_folder(folder: CheckpointFolder) -> Layout:
    """The family of a checkpoint that is open."""
    names = strip_prefixes(folder.tensors)
    return detect(folder.config, folder.shapes(names))


def detect_by_config(config: Config) -> Layout | None:
    """The family that config.json alone determines; None where only the tensors can.

    Some kinds keep their weights in files that are not listed here (Medusa: medusa_lm_head.pt).
    """
    if "speculators_model_type" in config or "speculators_config" in config:
        kind = speculators_type(config)
        return None if kind in _SPECULATORS_BY_TENSORS else _SPECULATORS_BLOCKS.get(str(kind), Layout.SPECULATORS)
    architectures = config.get("architectures")
    words = [config.get("model_type"), *(architectures if isinstance(architectures, list) else ())]
    name = " ".join(word for word in words if isinstance(word, str)).lower()
    for layout, keys, part in _NAMED:
        if any(key in config for key in keys) or part in name:
            return layout
    return None


_SPECULATORS_BY_TENSORS = ("eagle3", "mtp")
_SPECULATORS_BLOCKS = {"dflash": Layout.DFLASH, "dspark": Layout.DSPARK, "dflash2": Layout.DFLASH2}


def speculators_type(config: Config) -> str | None:
    """The kind of head that a config.json of the package speculators describes."""
    named = lookup(config, "speculators_model_type") or lookup(config, "speculators_config.algorithm")
    return named if isinstance(named, str) else None


_TABLES = read_tables("drafters", "checkpoints/layouts.toml")
_NAMED = tuple((Layout[kind], tuple(keys), part) for kind, keys, part in _TABLES["named"])
_MARKERS = tuple((marker, Layout[kind]) for marker, kind in _TABLES["markers"])


def _detect_eagle(config: Config, shapes: Shapes) -> Layout:
    first = [name for name in shapes if name.startswith(("midlayer.", "layers.0."))]
    has_latent = any("kv_a_proj_with_mqa" in name for name in first)
    if has_latent and ("fc.weight" in shapes or first[0].startswith("midlayer.")):  # else a whole model of DeepSeek's
        return Layout.EAGLE3_MLA
    query = next((shapes[name] for name in first if name.endswith(".self_attn.q_proj.weight")), None)
    output = next((shapes[name] for name in first if name.endswith(".self_attn.o_proj.weight")), None)
    hidden = lookup(config, "hidden_size") if output is None else output[0]  # exporters may leave out a class's default
    if any(name.startswith("midlayer.") for name in first) or (query and hidden and query[-1] == 2 * hidden):
        return Layout.EAGLE3_MOE if any(".mlp.experts." in name for name in first) else Layout.EAGLE3
    return Layout.EAGLE1 if query and query[-1] == hidden and "fc.weight" in shapes else Layout.UNKNOWN


def _is_whole(config: Config, names: Iterable[str]) -> bool:
    """Whether these are a whole language model's tensors: all kinds, by another library's names its embedding."""
    if _WHOLE_MODEL.issubset(names):
        return True
    kinds = config.get("architectures")
    named = isinstance(kinds, list) and any(str(kind).endswith(_WHOLE_CLASSES) for kind in kinds)
    return named and any(name.endswith(_WHOLE_EMBEDDINGS) for name in names)


def require(found: Layout, wanted: Layout, config: Config, names: Iterable[str]) -> None:
    """Refuse a checkpoint of another family. Raises HeadLoadError, which names the checkpoint's kind."""
    if found is wanted:
        return
    detail = f" of type {speculators_type(config)!r}" if found is Layout.SPECULATORS else ""
    if found is Layout.CAUSAL_LM:
        raise HeadLoadError(
            f"this loader reads {wanted.value} heads; the checkpoint is a whole language model: give it as the "
            "target, and a head as draft"
        )
    if found is Layout.UNKNOWN:
        listed = sorted(names)
        detail = f"; its first tensors are {', '.join(listed[:6])}" if listed else "; it has no tensors"
    known = f"; {_SERVED}" if found in _UNSERVED else ""
    raise HeadLoadError(
        f"this loader reads {wanted.value} heads, the checkpoint's layout is {found.value}{detail}{known}"
    )


_UNSERVED = {layout for layout, _, _ in _NAMED} - {Layout.DFLASH, Layout.DFLASH2, Layout.DSPARK} | {
    *(Layout.PARALLEL, Layout.EAGLE3_MLA, Layout.EAGLE3_MOE, Layout.SPECULATORS, Layout.MTP_OTHER),
}
_SERVED = (
    "this kind of head is not supported: take an EAGLE-3, DFlash or DSpark head, or draft='mtp' where the target has a "
    "module"
)


def module_names(num_layers: int, num_modules: int) -> tuple[str, ...]:
    """Patterns that find (re.search) the names of module tensors, in any format, and no others of a target.

    Args:
        num_layers: N of the target; num_modules: how many its configuration has.

    >>> import re
    >>> patterns = module_names(4, 1)
    >>> names = ("model.layers.4.enorm.weight", "model.layers.3.mlp.gate.weight", "mtp.fc.weight")
    >>> [any(re.search(p, name) for p in patterns) for name in names]
    [True, False, True]
    """
    numbered = (rf"(^|\.)layers\.{num_layers + k}\." for k in range(num_modules))
    parts = r"(emb_norm|hidden_norm|linear_proj|block)"
    return (*numbered, r"(^|\.)mtp_layers\.\d+\.", rf"(^|\.)mtp_{parts}\.\d+\.", r"(^|\.)mtp(_dspark)?\.")
