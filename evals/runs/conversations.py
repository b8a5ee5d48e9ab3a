"""Answers one chunk of questions under every configuration, and the worker that holds the loaded models.

Except for times a chunk's answers are a pure function of its arguments. It is the unit of work of every executor, so
that one process and many machines give the same answers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeVar

from attention.cached import cached_property
from attention.errors import named_error
from evals.data.datasets import Question, opening, render
from evals.runs.answers import Answer, Json, Turn, seconds_a_round, segments
from specdec.errors import SpecdecError
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams
from specdec.values import Fields, without

Result = TypeVar("Result")


@dataclass(frozen=True)
class Configuration:
    """One way of generating that is measured.

    Attributes:
        name: shown in every output; k: drafts a round, 0 for the target alone; model: key of the loaded model.
    """

    name: str
    k: int
    model: str = "main"


@dataclass(frozen=True)
class Asking:
    """How every question is sent, the same for all configurations.

    params: sampling; its seed is replaced by one drawn from `seed`, the question and the turn. templated: apply the
    chat template; system: a system prompt, or None. return_drafts: return the drafted tokens as segments of the text.
    """

    params: SamplingParams
    templated: bool
    system: str | None = None
    seed: int = 0
    return_drafts: bool = False


@dataclass(frozen=True)
class Work:
    """One chunk of questions to answer under some configurations. `index` is its place in the data set."""

    index: int
    chunk: tuple[Question, ...]
    arms: tuple[Configuration, ...]
    asking: Asking


def run_chunk(models: Fields, work: Work) -> list[Answer]:
    """Answer a chunk under every configuration; its index picks the first, so that none is always first.

    A chunk that raises is repeated question by question; what still raises becomes an answer with `error`.
    """
    shift = work.index % len(work.arms)
    answers = []
    for arm in [*work.arms[shift:], *work.arms[:shift]]:
        answers += _guarded(models[arm.model], arm, work.chunk, work.asking)
    names = [arm.name for arm in work.arms]
    return sorted(answers, key=lambda answer: names.index(answer.arm))


def _guarded(model: Any, arm: Configuration, chunk: Sequence[Question], asking: Asking) -> list[Answer]:
    try:
        return _converse(model, arm, chunk, asking)
    except (SpecdecError, RuntimeError) as error:  # RuntimeError: what torch raises, out of memory included
        if len(chunk) > 1:
            return [answer for question in chunk for answer in _guarded(model, arm, [question], asking)]
        question = chunk[0]
        text = named_error(error)
        return [Answer(question.id, arm.name, question.category, question.task, error=text)]


def prompt_of(tokenizer: Any, question: Question, asking: Asking, answers: Sequence[str] = ()) -> list[int]:
    """The prompt of the turn that follows the model's answers to those before."""
    messages = opening(question, asking.system)
    for turn, answer in zip_longest(question.turns[: len(answers) + 1], answers):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return render(tokenizer, messages, asking.templated)


def _converse(model: Any, arm: Configuration, chunk: Sequence[Question], asking: Asking) -> list[Answer]:
    turns: list[list[Turn]] = [[] for _ in chunk]
    for number in range(max(len(question.turns) for question in chunk)):
        active = [i for i, question in enumerate(chunk) if number < len(question.turns)]
        prompts = [prompt_of(model.tokenizer, chunk[i], asking, [turn.text for turn in turns[i]]) for i in active]
        params = [
            replace(
                asking.params,
                seed=question_seed(asking.seed, chunk[i].id, number),
                num_speculative_tokens=arm.k,
                return_drafts=asking.return_drafts,
            )
            for i in active
        ]
        start = time.perf_counter()
        completions = model.generate(prompts, params)
        wall_s = (time.perf_counter() - start) / len(prompts)
        for i, completion in zip(active, completions, strict=True):
            turns[i].append(to_turn(model.tokenizer, completion, wall_s))
    return [
        Answer(question.id, arm.name, question.category, question.task, tuple(own))
        for question, own in zip(chunk, turns, strict=True)
    ]


def to_turn(tokenizer: Any, completion: Any, wall_s: float) -> Turn:
    """The record of one completion. `wall_s`: its share of the generate call's wall time."""
    stats = completion.stats
    return Turn(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        prompt_tokens=stats.prompt_tokens,
        text_tokens=len(tokenizer(completion.text)["input_ids"]),
        rounds=stats.rounds,
        segments=segments(tokenizer, completion),
        wall_s=wall_s,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
        logprobs=tuple((one.logprob, *(value for _, value in one.top)) for one in completion.logprobs or ()),
    )


def question_seed(seed: int, question_id: str, turn: int) -> int:
    """The seed of one turn: a function of the run's seed, the question and the turn, never of order or worker."""
    text = f"{seed}/{question_id}/{turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


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


class Worker:
    """Models by key, loaded once; by itself, it is the executor of a run in this process."""

    def __init__(self, specs: Mapping[str, ModelSpec], load: Callable[[ModelSpec], Any] = ModelSpec.load) -> None:
        self.models = {key: load(spec) for key, spec in specs.items()}

    def run(self, works: Sequence[Work]) -> Iterator[list[Answer]]:
        """The answers of each piece of work as they come."""
        return map(self.answer, works)

    def answer(self, work: Work) -> list[Answer]:
        """Answer one chunk."""
        return run_chunk(self.models, work)

    def on_one(self, function: Callable[[Worker], Result]) -> Result:
        """Call a function with this worker."""
        return function(self)

    def facts(self) -> dict[str, Json]:
        """Per model: what it is, the hashes of its weights, and whether it has a chat template."""
        return self._known_facts

    @cached_property
    def _known_facts(self) -> dict[str, Json]:
        """As they were when they were first asked for: they read all weights."""
        return {key: _facts(model) for key, model in self.models.items()}

    def step_times(
        self, batch_sizes: Sequence[int], arms: Sequence[Configuration], prompt: Question, asking: Asking
    ) -> dict[int, dict[int, float]]:
        """{batch size: {K: mean seconds of a round}} measured on copies of one question."""
        params = SamplingParams(
            max_new_tokens=min(asking.params.max_new_tokens, 64),
            temperature=asking.params.temperature,
            ignore_eos=True,
            cache_prefix=asking.params.cache_prefix,
        )
        long = replace(asking, params=params)
        found = {}
        for size in batch_sizes:
            copies = tuple(Question(f"{prompt.id}/{i}", prompt.turns[:1], prompt.history) for i in range(size))
            found[size] = {arm.k: seconds_a_round(self.answer(Work(0, copies, (arm,), long))) for arm in arms}
        return found


_OF_ONE_START = ("start", "kernels")
"""Facts that differ from start to start of the same model; so do the sizes and seconds of its graphs."""


def _facts(model: Any) -> Json:
    described = without(model.describe(), _OF_ONE_START)
    ranks = getattr(model, "ranks", None)
    template = getattr(model.tokenizer, "chat_template", None)
    part = "" if ranks is None else f"rank {ranks.rank} of {ranks.size}: "  # the weights that this process holds
    return {
        **described,
        "graphs": described["graphs"]["state"],
        "target_sha256": part + weights_sha256(model.hf_model),
        "head_sha256": None if model.head is None else weights_sha256(model.head),
        "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
    }


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
