"""Small draft models as a family of draft heads: the functions of `drafters.families.FamilyCode`."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from attention.errors import InvalidInputError
from drafters.base import LazyFacts, Recipe
from drafters.checkpoints.config_fields import Config, FamilyOptions, HeadReport, ResolvedField
from drafters.checkpoints.layouts import Layout
from drafters.checkpoints.tensor_files import CheckpointPath, locate, open_folder, read_json
from drafters.errors import HeadLoadError, HeadMismatchError

if TYPE_CHECKING:
    from drafters.assistant.head import AssistantHead

_FIELDS = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "dtype")
_INSTEAD = "give a smaller model of the target's own series, or a draft head"


def load_head(
    path: Path | PreTrainedModel, model: PreTrainedModel, facts: LazyFacts, options: FamilyOptions
) -> AssistantHead:
    """Load a small model in the target's dtype and on its device, or take a loaded one as it is.

    Raises:
        HeadLoadError: its files are damaged; it is quantised, the target itself, or cannot run over the head's pages.
        HeadMismatchError: its vocabulary is not the target's, padding aside.
    """
    from drafters.assistant.head import AssistantHead  # late: the head check asks every family for other readings

    if isinstance(path, PreTrainedModel):
        assistant = path
        report = None
    else:
        _check_another(locate(path) == _folder_of(model), path)
        report = describe_head(path, options)
        _check_plain(open_folder(path).config, path)
        assistant = _loaded(path, model)
    _check_another(assistant is model, type(model).__name__)
    _check_plain(vars(assistant.config), type(assistant).__name__)
    _check_vocabulary(assistant, model)
    return AssistantHead(assistant, report, model.config.get_text_config().vocab_size)


def _check_another(is_target: bool, name: Any) -> None:
    if is_target:
        raise HeadLoadError(
            f"draft: {name} is the target itself, a whole language model: give it as the target, and as draft a head "
            "or a smaller model"
        )


def _check_plain(config: Config, name: Any) -> None:
    if config.get("quantization_config"):
        raise HeadLoadError(
            f"the draft model {name} is quantised, which is not served in draft models; give its checkpoint in "
            "bfloat16 or float16"
        )


def _loaded(path: Path, model: PreTrainedModel) -> PreTrainedModel:
    """A folder's model, as the target is. Raises HeadLoadError: transformers cannot read it, or tensors are missing."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=model.dtype, output_loading_info=True, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise HeadLoadError(f"{path}: transformers cannot load this draft model: {error}") from error
    assistant: PreTrainedModel
    assistant, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise HeadLoadError(f"{path}: the draft model's checkpoint lacks {', '.join(missing[:3])}")
    return assistant.to(model.device).eval().requires_grad_(False)  # type: ignore[arg-type]


def _check_vocabulary(assistant: PreTrainedModel, model: PreTrainedModel) -> None:
    """Raises HeadMismatchError: the sizes differ by more than padding, or a token has another id, where both tokenizers
    lie in files."""
    own, target = (each.config.get_text_config().vocab_size for each in (assistant, model))
    ours = _ids_of_tokens(assistant)
    theirs = _ids_of_tokens(model)
    padded = ours == theirs and max(ours.values(), default=own) < min(own, target)
    if own != target and not padded:
        raise HeadMismatchError(
            f"the draft model {type(assistant).__name__} has a vocabulary of {own} tokens, the target {target}, and no "
            "tokenizer.json of both shows that the same tokens are in use and the rest is padding: draft models of "
            f"other vocabularies are not served; {_INSTEAD}"
        )
    differing = [token for token, index in ours.items() if theirs.get(token, index) != index]
    if differing:
        token = min(differing, key=ours.__getitem__)
        raise HeadMismatchError(
            f"the draft model's tokenizer is another one: token {token!r} is {ours[token]} there, {theirs[token]} in "
            f"the target's ({len(differing)} tokens differ): draft models of other vocabularies are not served; "
            f"{_INSTEAD}"
        )


def _ids_of_tokens(model: PreTrainedModel) -> dict[str, int]:
    """The tokens of the tokenizer.json in a model's folder; {} without such a file."""
    folder = _folder_of(model)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return {}
    content = read_json(folder / "tokenizer.json")
    found = content.get("model", {}).get("vocab", {})
    ids = dict(found) if isinstance(found, dict) else {token: index for index, (token, _) in enumerate(found)}
    return ids | {each["content"]: each["id"] for each in content.get("added_tokens") or ()}


def _folder_of(model: PreTrainedModel) -> Path | None:
    """The folder on this machine that a model was loaded from; None where it has none."""
    try:
        file = cached_file(model.name_or_path, "config.json", local_files_only=True) if model.name_or_path else None
    except (OSError, ValueError):
        return None
    return None if file is None else Path(file).parent


def describe_head(path: CheckpointPath, options: FamilyOptions) -> HeadReport:
    """What its config.json says."""
    folder = open_folder(path)
    fields = tuple(ResolvedField(name, folder.config[name], name) for name in _FIELDS if name in folder.config)
    count = sum(prod(tensor.shape) for tensor in folder.tensors.values())
    return HeadReport(folder.path, Layout.CAUSAL_LM.value, fields, count)


def target_of(path: CheckpointPath) -> str | None:
    """None: it drafts for every target with its vocabulary."""
    return None


def not_exportable(path: CheckpointPath) -> str | None:
    """Why it has no other layout."""
    return (
        "it is a whole language model: give it as the target or as a draft model, here and in other projects; HEAD "
        "must be an EAGLE-3 head"
    )


def recipe(model: PreTrainedModel, facts: LazyFacts, longest: int, seed: int, options: FamilyOptions) -> Recipe[Any]:
    """Raises InvalidInputError: a model is trained as any other, by transformers."""
    raise InvalidInputError("a small draft model is trained as any language model, by transformers or TRL")
