"""Load multi-token-prediction modules straight from safetensors (transformers drops them when it loads a target)."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafters.checkpoints.config_fields import HeadReport, ResolvedField, by_presence, check_tensors, lookup
from drafters.checkpoints.layouts import Layout, layout_of_folder
from drafters.checkpoints.tensor_files import (
    CheckpointFolder,
    CheckpointPath,
    Names,
    StateDict,
    filled,
    naming,
    open_folder,
    write_tensors,
)
from drafters.errors import HeadLoadError
from drafters.mtp.convention import MtpConvention
from drafters.mtp.formats import (
    DEEPSEEK,
    ERNIE,
    FORMATS,
    SPECULATORS,
    MtpFormat,
    as_modules_are_named,
    dequantise,
    mixers_of,
    stack_experts,
    unstack_experts,
)
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpSpec, MtpTarget, attention_of

_SHARED = {
    "embed_tokens.weight": "embedding",
    "shared_head.head.weight": "lm_head",
    "transformer.shared_head.output.weight": "lm_head",
}
_COMPARED_ROWS = 64
_BY_FORMAT = MtpConvention()


def load_mtp(
    path: CheckpointPath,
    target: MtpTarget,
    dtype: torch.dtype,
    device: torch.device | str,
    convention: MtpConvention = _BY_FORMAT,
) -> tuple[MtpHead, ...]:
    """Load modules 0 … M-1 of a checkpoint, ready for inference; usually `path` is the target's own.

    Args:
        path: a folder, or a model's name on the Hugging Face hub; one file or an index.
        target: the model that they draft for; its embedding and lm_head are shared, not copied.
        dtype, device: for the weights; block-fp8 weights are dequantised first.
        convention: the input convention, which no checkpoint records; default: the format's reference code's.

    Raises:
        HeadLoadError: the checkpoint has no module, tensors are missing, unknown, of another shape or not finite, or
            its embedding or lm_head differs from the target's.
    """
    folder, form, modules = _opened(path, target)
    with naming(f"{folder.path}: {form.name} module"):
        return tuple(
            _load_module(folder, form, m, names, target, dtype, device, convention) for m, names in enumerate(modules)
        )


def describe_mtp(path: CheckpointPath, target: MtpTarget, convention: MtpConvention = _BY_FORMAT) -> HeadReport:
    """Every resolved field of a checkpoint's modules and where it came from; no weights are read.

    Raises:
        HeadLoadError: the checkpoint has no module.
    """
    folder, form, modules = _opened(path, target)
    fields = [ResolvedField("num_modules", len(modules), f"{form.name} names of tensors in the checkpoint")]
    for m, names in enumerate(modules):
        # Fields with the files of a module's tensors, and the tensors that are taken from the target instead.
        start = f"module {m}: " if len(modules) > 1 else ""
        own = {rest: full for rest, full in names.items() if rest not in _SHARED}
        files = sorted({folder.tensors[full].file.name for full in own.values()})
        rest, full = next(iter(own.items()))
        prefix = full.removesuffix(rest) if full.endswith(rest) else full.split(".")[0]  # as "model.layers.61."
        projection = next((full for rest, full in names.items() if form.rename(rest) == "eh_proj.weight"), "absent")
        copies = [full for rest, full in names.items() if rest in _SHARED]
        shared = (
            f"the file's {', '.join(copies)} must equal them" if copies else "the checkpoint brings none of its own"
        )
        fields += [
            ResolvedField(f"{start}tensors", len(own), f"{', '.join(files)}: {prefix}*"),
            ResolvedField(f"{start}projection", list(folder.tensors[projection].shape), projection),
            ResolvedField(f"{start}embedding, lm_head", "the target's", shared),
        ]
    if form.numbered:
        fields.append(ResolvedField("blocks", ", ".join(mixers_of(target.config)), "config mtp_layers_block_type"))
    else:
        kinds = [attention_of(target.config, m) for m in range(len(modules))]
        fields.append(ResolvedField("attention", ", ".join(dict.fromkeys(kind for kind, _ in kinds)), kinds[0][1]))
    first = {form.rename(rest) for rest in modules[0]}
    experts = {"*.experts.*" for name in first if ".experts." in name}
    by_format = f"{form.name} checkpoints are read so"
    option = "option mtp_concat"
    order = "hidden_first" if convention.hidden_first(form.hidden_first) else "embedding_first"
    given = "default" if convention.feedback == _BY_FORMAT.feedback else "option mtp_feedback"
    fields += [
        ResolvedField("concat", order, by_format if convention.concat == "auto" else option),
        ResolvedField("feedback", convention.feedback, given),
        by_presence({}, first, "final_norm", "norm.weight"),
        by_presence({}, first, "projection_bias", "eh_proj.bias"),
        by_presence({}, experts, "experts", "*.experts.*"),
    ]
    sizes = (torch.Size(folder.tensors[full].shape).numel() for names in modules for full in names.values())
    return HeadReport(folder.path, f"multi-token prediction, {form.name} names", tuple(fields), sum(sizes))


def deepseek_tensors(head: MtpHead, layer: int) -> StateDict:
    """A module's tensors under the names that DeepSeek checkpoints use for layer N + k, without shared tensors.

    A projection of [hidden, embedding] has its halves swapped: these checkpoints have [embedding, hidden].

    Raises:
        HeadLoadError: the module has something that these checkpoints cannot hold.
    """
    spec = head.spec
    state = head.state_dict()
    if not spec.final_norm or spec.projection_bias or spec.mixers:
        raise HeadLoadError(
            f"a DeepSeek-style module has one block of attention and an MLP, a final norm and no bias in its "
            f"projection; given is {spec}"
        )
    if spec.hidden_first:  # the halves are columns of the weight, so swapping them changes no result
        state["eh_proj.weight"] = torch.cat(state["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    back = {new: old for old, new in list(DEEPSEEK.renames.items())[::-1]} | {"blocks.0.": ""}  # DeepSeek's own: first
    named = {}
    for name, tensor in unstack_experts(state).items():
        new = next(prefix for prefix in back if name.startswith(prefix))
        named[f"model.layers.{layer}.{back[new]}{name.removeprefix(new)}"] = tensor.detach().clone()
    return named


def save_mtp(head: MtpHead, folder: CheckpointPath, target: MtpTarget) -> Path:
    """Write one module as a separate DeepSeek-style checkpoint: the target's config.json, and the module's tensors.

    Raises:
        HeadLoadError: see `deepseek_tensors`.
    """
    # safetensors stores contiguous tensors only.
    weights = {name: t.cpu().contiguous() for name, t in deepseek_tensors(head, target.num_layers).items()}
    config = copy.deepcopy(target.config)
    config.num_nextn_predict_layers = 1
    config.dtype = head.eh_proj.weight.dtype  # of these tensors; the target's may be another
    folder = Path(folder)
    config.save_pretrained(folder)
    write_tensors(folder, weights)
    return folder


def _format_of(folder: CheckpointFolder) -> MtpFormat:
    """The format of a checkpoint's modules. Raises HeadLoadError if it has none, or a format that is not supported."""
    if lookup(folder.config, "speculators_model_type") == "mtp":
        return SPECULATORS
    layout = layout_of_folder(folder)
    if layout in FORMATS:
        return FORMATS[layout]
    if layout in (Layout.MTP_OTHER, Layout.MTP_DSPARK):
        named = [name for name in sorted(folder.tensors) if "mtp" in name]
        raise HeadLoadError(
            f"{folder.path}: {layout.value} is not supported; its tensors are {', '.join(named[:3])}, …"
        )
    raise HeadLoadError(
        f"{folder.path} has no multi-token-prediction module: looked for *.eh_proj.weight, mtp_layers.*, "
        "mtp_linear_proj.* and mtp.*; many re-uploads of a model leave them out"
    )


def _opened(path: CheckpointPath, target: MtpTarget) -> tuple[CheckpointFolder, MtpFormat, list[Names]]:
    """A checkpoint, its format, and its modules' tensors, see `_modules`. Raises HeadLoadError: it has none."""
    folder = open_folder(path)
    form = _format_of(folder).of(target.config)
    return folder, form, _modules(folder, form, target.num_layers)


def _modules(folder: CheckpointFolder, form: MtpFormat, num_layers: int) -> list[Names]:
    """For every module, in order, its tensors' names inside it -> names in the files."""
    found: dict[int, dict[str, str]] = {}
    for full in folder.tensors:
        match = re.fullmatch(form.place, full)
        if match is not None:
            groups = match.groupdict()
            module, block = divmod(int(groups.get("k", 0)), form.blocks)
            start = f"{block}." if form.numbered else f"{groups['part']}." if "part" in groups else ""
            found.setdefault(module, {})[start + groups["rest"]] = full
    first = num_layers if form is DEEPSEEK else 0
    numbers = [k for k in sorted(found) if k >= first]
    if numbers != list(range(first, first + len(numbers))) or not numbers:
        raise HeadLoadError(
            f"{folder.path}: a target of {num_layers} layers has its {form.name} modules at {first}, {first + 1}, …; "
            f"the checkpoint has {numbers or sorted(found)}"
        )
    counted = lookup(folder.config, "num_nextn_predict_layers") or 0
    if len(numbers) < counted:
        raise HeadLoadError(
            f"{folder.path}: config.json counts {counted} multi-token-prediction modules, the files hold "
            f"{len(numbers)}; set num_nextn_predict_layers={len(numbers)} there to draft with what there is"
        )
    return [found[k] for k in numbers]


def _load_module(
    folder: CheckpointFolder,
    form: MtpFormat,
    module: int,
    names: Names,
    target: MtpTarget,
    dtype: torch.dtype,
    device: torch.device | str,
    convention: MtpConvention,
) -> MtpHead:
    own = {rest: full for rest, full in names.items() if rest not in _SHARED}
    for rest, what in _SHARED.items():
        if rest in names:
            _check_shared(folder, names[rest], getattr(target, what), what)
    stored = folder.load(own.values())
    weights = {form.rename(rest): stored[full] for rest, full in own.items()}
    weights = as_modules_are_named(weights, target.config.model_type)
    rows, columns = lookup(folder.config, "quantization_config.weight_block_size") or (128, 128)
    weights = stack_experts(dequantise(weights, (int(rows), int(columns))))
    spec = MtpSpec(
        hidden_first=convention.hidden_first(form.hidden_first),
        final_norm="norm.weight" in weights or form is not ERNIE,
        feedback=convention.feedback,
        projection_bias="eh_proj.bias" in weights,
        experts=any(".experts." in name for name in weights),
        mixers=mixers_of(target.config) if form.numbered else (),
        attention="full_attention" if form.numbered else attention_of(target.config, module)[0],
    )
    head = MtpHead(spec, target, torch.device("meta"))
    expected = {name: tensor.shape for name, tensor in head.state_dict().items()}
    check_tensors({name: tensor.shape for name, tensor in weights.items()}, expected)
    # Routing biases stay float32, as transformers keeps them.
    wide = {name: torch.float32 for name in weights if name.endswith("e_score_correction_bias")}
    return filled(head, {name: t.to(device, wide.get(name, dtype)) for name, t in weights.items()})


def _check_shared(folder: CheckpointFolder, name: str, shared: Tensor, what: str) -> None:
    """Compare the first rows of a duplicate with the target's tensor that is used instead of it."""
    info = folder.tensors[name]
    if info.shape[1] != shared.shape[1]:
        raise HeadLoadError(f"{name} is {list(info.shape)}, the target's {what} is {list(shared.shape)}")
    if info.file.suffix == ".safetensors":
        with safe_open(info.file, framework="pt", device="cpu") as file:
            own = file.get_slice(name)[:_COMPARED_ROWS]
    else:
        own = folder.load([name])[name][:_COMPARED_ROWS]
    if not torch.equal(own.to(shared.dtype), shared[: len(own)].detach().cpu()):
        raise HeadLoadError(f"{name} differs from the target's {what}; heads with tensors of their own are not read")
