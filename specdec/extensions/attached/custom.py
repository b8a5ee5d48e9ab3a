"""custom_generate: an object for `model.generate(custom_generate=…)`, and folders of a repository whose files call it.

transformers gives such a callable everything prepared, but neither `streamer` nor `tokenizer` (5.17 to 5.24): the
object holds them.

Source: huggingface/transformers, generation/utils.py: `generate`, `_extract_generation_mode_kwargs`,
`load_custom_generate`.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from specdec.errors import InvalidInputError
from specdec.extensions.attached.asked import PREPARED, Asked, check_arguments
from specdec.extensions.attached.attach import Attachment, attach, wrapped
from specdec.model import SpeculativeModel
from specdec.values import Options, without

HEAD_FOLDER = "custom_generate/head"
"""Where a repository with a `custom_generate` folder has its draft head."""
_CODE = '''"""Speculative decoding with the draft head beside this file; see `specdec export`."""

EXPORTED = {folder!r}


def generate(*given, model, **named):
    from specdec.extensions.attached.custom import generate_in_repository

    return generate_in_repository(EXPORTED, given, model, named)
'''
_PROJECT = "specdec-hf"


@dataclass(frozen=True, eq=False, repr=False)
class CustomGenerate:
    """A callable for `model.generate(custom_generate=…)`. The first call of a model wraps it; `close` frees that."""

    draft: Any
    streamer: Any
    tokenizer: Any
    stop_strings: Any
    options: Options
    _calls: WeakKeyDictionary[PreTrainedModel, SpeculativeModel] = field(default_factory=WeakKeyDictionary)

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: GenerationConfig | None = None,
        **arguments: Any,
    ) -> Any:
        """As transformers calls it: rows expanded by num_return_sequences, lengths resolved, processors merged.

        Raises:
            InvalidInputError: what is not served, by name.
        """
        config = copy.deepcopy(generation_config or model.generation_config)
        mask = arguments.pop("attention_mask", None)
        check_arguments(arguments, PREPARED)
        mask = torch.ones_like(input_ids) if mask is None else mask
        config.num_return_sequences = 1
        config.stop_strings = self.stop_strings
        own, function = _of_caller(model, config, input_ids, logits_processor or ())
        criteria = [one for one in stopping_criteria or () if not _of_config(one, config)]
        asked = Asked(input_ids, mask, config, own, tuple(criteria), function, self.streamer, self.tokenizer)
        asked.check(model)  # before the model is wrapped, which takes long
        return asked.started(self.wrapping(model)).result()

    def close(self) -> None:
        """Free what wraps models. Idempotent; a later call wraps its model anew."""
        while self._calls:
            self._calls.popitem()[1].close()

    def wrapping(self, model: PreTrainedModel) -> SpeculativeModel:
        """What runs the calls of a model; made now if there is none."""
        if model not in self._calls:
            self._calls[model] = wrapped(model, self.draft, self.options)
        return self._calls[model]


def custom_generate(
    draft: Any = None,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    **options: Any,
) -> CustomGenerate:
    """An object for `model.generate(**inputs, custom_generate=specdec.custom_generate(draft=…))`.

    Keep it: the first call wraps the model and allocates a cache, later ones use them; `close()` frees them.

    Args:
        draft: as for `SpeculativeModel.from_pretrained`.
        streamer: `generate` does not hand its own to such a callable; give it here.
        tokenizer: the same, for stop strings.
        stop_strings: the same.
        options: as for `SpeculativeModel.from_pretrained`.
    """
    return CustomGenerate(draft, streamer, tokenizer, stop_strings, options)


def generate_in_repository(exported: str, given: tuple[Any, ...], model: PreTrainedModel, named: Options) -> Any:
    """What `custom_generate/generate.py` of an exported folder calls: attaches the model to the head that lies there.

    From then on the model's `generate` is the attached one, with no file of the repository between.

    exported: the folder, as it was when it was written, for models that were loaded from elsewhere.
    """
    if Attachment.of(model) is None:
        attach(model, _head_of(model, exported))
    return cast(Any, model).generate(*given, **without(named, ("custom_generate", "trust_remote_code")))


def _head_of(model: PreTrainedModel, exported: str) -> str:
    """The head's folder. Raises InvalidInputError where none is found."""
    name = str(model.name_or_path or "")
    for place in (Path(name) / HEAD_FOLDER, Path(exported) / HEAD_FOLDER):
        if (place / "config.json").is_file():
            return str(place)
    if name and not Path(name).exists():
        from huggingface_hub import snapshot_download

        return str(Path(snapshot_download(name, allow_patterns=f"{HEAD_FOLDER}/*")) / HEAD_FOLDER)
    raise InvalidInputError(f"there is no draft head in {Path(name) / HEAD_FOLDER}; write it with `specdec export`")


def write_repository(head: Path, target: Path | None, out: Path) -> Path:
    """Write `out`/custom_generate, with a copy of the head, and beside it the target's own files; returns `out`.

    Files of the target are hard links where the file system has them, else copies.

    target: a folder with a transformers checkpoint; None: only the folder that belongs into the target's repository.

    Raises:
        InvalidInputError: the head is a file, or there is a custom_generate folder in the target.
    """
    if not head.is_dir():
        raise InvalidInputError(f"{head} is no folder; give the folder of a head")
    if target is not None and (target / "custom_generate").exists():
        raise InvalidInputError(f"{target} has a custom_generate folder already; give a target without one")
    folder = out / "custom_generate"
    folder.mkdir(parents=True)
    shutil.copytree(head, out / HEAD_FOLDER)
    (folder / "generate.py").write_text(_CODE.format(folder=str(out.resolve())), "utf-8")
    (folder / "requirements.txt").write_text(f"{_PROJECT}>={version(_PROJECT)}\n", "utf-8")
    for path in () if target is None else target.iterdir():
        if path.is_file():
            _linked(path.resolve(), out / path.name)
    return out


def _linked(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def _of_caller(model: Any, config: GenerationConfig, ids: Tensor, given: Iterable[Any]) -> tuple[tuple[Any, ...], Any]:
    """The caller's own among merged processors, and his prefix function.

    Those that the config's options make are left out: they are served as options.
    """
    made = model._get_logits_processor(
        generation_config=copy.deepcopy(config),
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        device=ids.device,
        model_kwargs={},
    )
    own = []
    function = None
    for one in given:
        twin = next((i for i, other in enumerate(made) if _alike(one, other)), None)
        if twin is not None:
            del made[twin]
        elif isinstance(one, PrefixConstrainedLogitsProcessor):
            function = one._prefix_allowed_tokens_fn
        else:
            own.append(one)
    return tuple(own), function


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    pairs = [(value, vars(other).get(name)) for name, value in vars(one).items()]
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or bool(a == b)
        for a, b in pairs
    )


def _of_config(criterion: Any, config: GenerationConfig) -> bool:
    """Whether a criterion repeats the config."""
    if isinstance(criterion, MaxLengthCriteria):
        return criterion.max_length >= (config.max_length or 0)
    if isinstance(criterion, MaxTimeCriteria):
        return criterion.max_time == config.max_time
    return isinstance(criterion, EosTokenCriteria)
