"""A worker: the loaded models of one process, and what can be asked of them. Every executor is made of these."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.data.datasets import Question
from evals.runs.answers import Answer
from evals.runs.runner import Asking, Configuration, run_chunk
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams


@dataclass(frozen=True)
class ModelSpec:
    """What one model is loaded from, and how. It is sent to the workers: names only, no loaded objects."""

    target: str
    draft: str | None = None
    options: LoadOptions = field(default_factory=LoadOptions)

    def load(self) -> Any:
        """The model. Raises what `from_pretrained` raises."""
        import specdec

        return specdec.SpeculativeModel.from_pretrained(self.target, self.draft, **self.options.as_arguments())


@dataclass(frozen=True)
class Work:
    """One chunk of questions to answer under some configurations. `index` is its place in the data set."""

    index: int
    chunk: tuple[Question, ...]
    arms: tuple[Configuration, ...]
    asking: Asking


class Worker:
    """Models by key, loaded once."""

    def __init__(self, specs: Mapping[str, ModelSpec], load: Callable[[ModelSpec], Any] = ModelSpec.load) -> None:
        self.models = {key: load(spec) for key, spec in specs.items()}

    def run(self, work: Work) -> list[Answer]:
        """Answer one chunk."""
        return run_chunk(self.models, work.arms, work.chunk, work.asking, rotation=work.index)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Per model: what it is, the hashes of its weights, and whether it has a chat template."""
        return {key: _facts(model) for key, model in self.models.items()}

    def step_times(
        self, batch_sizes: Sequence[int], arms: Sequence[Configuration], prompt: Question, asking: Asking
    ) -> dict[int, dict[int, float]]:
        """{batch size: {K: mean seconds of a round}} measured on copies of one question."""
        return {size: {arm.k: self._round_seconds(size, arm, prompt, asking) for arm in arms} for size in batch_sizes}

    def _round_seconds(self, size: int, arm: Configuration, prompt: Question, asking: Asking) -> float:
        copies = [Question(f"{prompt.id}/{i}", prompt.turns[:1], prompt.history) for i in range(size)]
        long = Asking(_endless(asking.params), asking.templated, asking.system, asking.seed)
        answers = run_chunk(self.models, (arm,), copies, long)
        seconds = sum(turn.decode_s for answer in answers for turn in answer.turns)
        rounds = sum(len(answer.rounds) for answer in answers)
        return seconds / rounds if rounds else float("nan")


def _endless(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=min(params.max_new_tokens, 64),
        temperature=params.temperature,
        ignore_eos=True,
        cache_prefix=params.cache_prefix,
    )


_OF_ONE_START = ("start", "kernels")
"""Facts that differ from start to start of the same model; so do the sizes and seconds of its graphs."""


def _facts(model: Any) -> dict[str, Any]:
    described = {name: value for name, value in model.describe().items() if name not in _OF_ONE_START}
    return {
        **described,
        "graphs": described["graphs"]["state"],
        "target_sha256": _whose(model) + weights_sha256(model.hf_model),
        "head_sha256": None if model.head is None else weights_sha256(model.head),
        "chat_template_sha256": _text_sha256(getattr(model.tokenizer, "chat_template", None)),
    }


def _whose(model: Any) -> str:
    """Which part of the weights this process holds, in words; "" for all of them."""
    ranks = getattr(model, "ranks", None)
    return "" if ranks is None else f"rank {ranks.rank} of {ranks.size}: "


def _text_sha256(text: Any) -> str | None:
    return hashlib.sha256(str(text).encode()).hexdigest() if text else None


def weights_sha256(module: Any) -> str:
    """sha256 over the names, dtypes, shapes and bytes of a module's state, in the order of the names."""
    import torch

    from attention.hf.weights import memory_of

    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in memory_of(tensor.detach()):  # a quantised tensor may be made of several
            found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
