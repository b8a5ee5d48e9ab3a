"""Greedy answers with and without speculation must be equal; where they differ, a replay in float64 decides.

Different batch shapes round differently, so two candidates that tie within rounding error may swap. Only that is
allowed: the tokens of both configurations within `tolerance` of the best logit in the replay. Anything else is a
defect. Sampled answers of a model with `sampling="keyed"` must be equal likewise: to each logit the noise of its token
and position is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from itertools import groupby, takewhile, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from attention.backends.limits import dtype_name
from evals.acceptance.summary import ByArm, Json
from evals.data.datasets import DataSet, Question
from evals.runs.answers import Answer
from evals.runs.conversations import Asking, Configuration, Worker, prompt_of, question_seed
from evals.runs.executor import Executor
from evals.runs.verdict import Verdict, together
from specdec.errors import OutOfDeviceMemoryError
from specdec.requests.noise import gumbel
from specdec.rounds.randomness import noise_seeds, request_key
from specdec.values import TokenIds

_HIGHER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
_AT_ONCE = 32
"""Texts of one forward pass."""


class Replay:
    """A copy in higher precision (float64 of float32, float32 of half precision), with eager attention and experts."""

    def __init__(self, hf_model: Any, device: torch.device | None = None) -> None:
        """hf_model: undivided. device: of the copy, default the model's.

        Raises:
            OutOfDeviceMemoryError: there is no room for the copy.
        """
        self.dtype = _higher(hf_model.dtype)
        place = hf_model.device if device is None else device
        check_room(hf_model.config, self.dtype, place)
        self._model = AutoModelForCausalLM.from_config(
            hf_model.config, dtype=self.dtype, attn_implementation="eager"
        ).to(place)
        self._model.set_experts_implementation("eager")  # grouped matmuls know no float64
        self._model.load_state_dict(hf_model.state_dict())
        self._model.eval()
        known = signature(self._model.forward).parameters
        self._keeps_few = "logits_to_keep" in known

    @classmethod
    def of(cls, model: Any) -> Replay:
        """For a SpeculativeModel. With several ranks its checkpoint is read again, as a rank has only a share of the
        weights.

        Raises:
            OutOfDeviceMemoryError: this rank's GPU has no room for the whole.
        """
        if getattr(model, "ranks", None) is None:
            return cls(model.hf_model)
        check_room(model.hf_model.config, _higher(model.dtype), model.device)  # before anything is read
        checkpoint = model.checkpoint
        whole = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=model.dtype, **checkpoint.options)
        return cls(whole, model.device)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of the token after `token_ids`: [V], in the copy's dtype, on the CPU."""
        return self.all_logits(token_ids)[-1]

    def all_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after every one of `token_ids`: [T, V], in the copy's dtype, on the CPU."""
        return self._after([token_ids], len(token_ids))[0]

    def logits_after(self, prompt: TokenIds, texts: Sequence[TokenIds]) -> Iterator[tuple[TokenIds, Tensor]]:
        """Each of several texts that follow `prompt`, none of them empty, with the logits after every one of its
        tokens: [len(text), V], on the CPU. Texts of one length that stand side by side share a forward pass.
        """
        for length, group in groupby(texts, len):
            some = list(group)
            for start in range(0, len(some), _AT_ONCE):
                chunk = some[start : start + _AT_ONCE]
                yield from zip(chunk, self._after([prompt + text for text in chunk], length), strict=True)

    @torch.inference_mode()
    def _after(self, texts: Sequence[Sequence[int]], last: int) -> Tensor:
        ids = torch.tensor([list(text) for text in texts], device=self._model.device)
        few = {"logits_to_keep": last} if self._keeps_few else {}
        return self._model(ids, use_cache=False, **few).logits[:, -last:].cpu()


def _higher(dtype: torch.dtype) -> torch.dtype:
    return _HIGHER.get(dtype, torch.float64)


def check_room(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Check that a GPU has room for a copy, before it is made.

    Raises:
        OutOfDeviceMemoryError: with needed and free memory.
    """
    if device.type != "cuda":
        return
    with torch.device("meta"):
        copy = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    weights = sum(parameter.numel() for parameter in copy.parameters())
    needed = weights * dtype.itemsize
    (free, total) = torch.cuda.mem_get_info(device)
    if needed > free:
        raise OutOfDeviceMemoryError(
            f"the check replays the whole target in {dtype_name(dtype)}, which takes "
            f"{needed / 2**30:.1f} GiB on {device}; {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free. Give a "
            "smaller KV cache (--kv-cache-tokens, --gpu-memory-utilization); a target that one GPU cannot hold so has "
            "no replay: `specdec eval acceptance` compares its answers with the target's alone, without one"
        )


FLOAT32_TOLERANCE = 1e-4
KEYED_TEMPERATURE = 2.0
"""At which noise decides many tokens, of whatever text."""
_HALF_ULPS = 8.0
VERDICT = (
    "A divergence is allowed only where the replay puts the tokens of both configurations within the tolerance of the "
    f"best logit ({FLOAT32_TOLERANCE:g} in a float64 replay of a float32 model; for half precision {_HALF_ULPS:g} "
    "units in the last place of the best logit, replayed in float32). NOT TESTED: no draft was verified. Keyed: sampled"
    f" at temperature {KEYED_TEMPERATURE:g}, with the noise of each position added to the logits."
)


@dataclass(frozen=True)
class Difference:
    """The first place where two answers to one question differ.

    Attributes:
        turn, position: which answer, and which new token of it.
        alone, speculative: the two tokens (None: it had ended).
    """

    turn: int
    position: int
    alone: int | None
    speculative: int | None


@dataclass(frozen=True)
class Divergence(Difference):
    """Such a place, judged.

    Attributes:
        gap: top-1 less top-2 logit in the replay. behind: the best logit less the lower of the two tokens'.
        tolerance: the most that `behind` may be. allowed: the verdict.
    """

    question_id: str
    arm: str
    gap: float
    behind: float
    tolerance: float
    allowed: bool


def first_difference(alone: Answer, speculative: Answer) -> Difference | None:
    """The first turn and token in which two answers differ, or None."""
    for turn, pair in enumerate(zip(alone.token_ids, speculative.token_ids, strict=True)):
        for position, (left, right) in enumerate(zip_longest(*pair)):
            if left != right:
                return Difference(turn, position, left, right)
    return None


def logprob_difference(alone: Answer, speculative: Answer) -> float:
    """The largest difference of two answers' log-probabilities before their tokens differ; 0 without any."""
    same = takewhile(lambda two: two[0][0] == two[1][0], zip(_steps(alone), _steps(speculative), strict=False))
    return max((float(np.abs(np.subtract(one[1], other[1])).max()) for one, other in same), default=0.0)


def _steps(answer: Answer) -> list[tuple[int, tuple[float, ...]]]:
    return [step for turn in answer.turns for step in zip(turn.token_ids, turn.logprobs, strict=False)]


Case = tuple[Question, Answer, Difference]
"""A question, the target's own answer, and where the other one differs."""


def judge(worker: Worker, arm: Configuration, asking: Asking, cases: Sequence[Case]) -> list[Divergence]:
    """Decide on the divergences of one configuration, where its model is: a verdict a case."""
    model = worker.models[arm.model]
    replay = Replay.of(model)
    return [_verdict(model, replay, arm, asking, *case) for case in cases]


def _verdict(
    model: Any, replay: Replay, arm: Configuration, asking: Asking, question: Question, alone: Answer, place: Difference
) -> Divergence:
    """Replay the common prefix of a divergence."""
    before = [turn.text for turn in alone.turns[: place.turn]]
    prompt = prompt_of(model.tokenizer, question, asking, before)
    common = alone.token_ids[place.turn][: place.position]
    logits = replay.logits([*prompt, *common]).double()
    tolerance = tolerance_of(model.hf_model.dtype, float(logits.max()))
    if asking.params.temperature:
        key = request_key(question_seed(asking.seed, question.id, place.turn), 0)
        scores = logits / asking.params.temperature + noise_at(key, len(prompt) + len(common), len(logits))
    else:
        scores = logits
    top = scores.topk(2).values
    behind = float("inf")  # one configuration went on where the other had ended
    if place.alone is not None and place.speculative is not None:
        behind = float(top[0] - scores[[place.alone, place.speculative]].min())
    return Divergence(
        **vars(place),
        question_id=question.id,
        arm=arm.name,
        gap=float(top[0] - top[1]),
        behind=behind,
        tolerance=tolerance,
        allowed=behind < tolerance,
    )


def noise_at(key: int, position: int, size: int) -> Tensor:
    """[size] float64, of a request's token at a position. key: see `request_key`.

    Source: `specdec.requests.noise`.
    """
    seeds = noise_seeds(np.array([key], np.uint64), np.array([position]))
    return gumbel(torch.from_numpy(seeds), torch.arange(size)).double()


def tolerance_of(dtype: Any, best: float) -> float:
    """Most that a token may be behind the best logit of a replay to be a near tie. dtype: of the model."""
    if dtype in (torch.float32, torch.float64):
        return FLOAT32_TOLERANCE
    return float(_HALF_ULPS * torch.finfo(dtype).eps * abs(best))


def compare_greedy(
    executor: Executor, data: DataSet, arms: Sequence[Configuration], kept: ByArm, asking: Asking
) -> Json:
    """Compare each configuration with the first one, question by question; every divergence is judged.

    kept: answers of each configuration to the same questions, in the same order.
    """
    questions = {question.id: question for question in data.questions}
    baseline = kept[arms[0].name]
    results: list[Json] = []
    for arm in arms[1:]:
        pairs = zip(baseline, kept[arm.name], strict=True)
        found = [(questions[one.question_id], one, first_difference(one, other)) for one, other in pairs]
        cases = [(question, one, place) for question, one, place in found if place is not None]
        verdicts = executor.on_one(partial(judge, arm=arm, asking=asking, cases=cases)) if cases else []
        apart = max(map(logprob_difference, baseline, kept[arm.name]), default=0.0)
        answers = kept[arm.name]
        total = len(answers)
        rounds = [record for answer in answers for record in answer.rounds]
        drafts = sum(record.drafted for record in rounds)
        defects = sum(not v.allowed for v in verdicts)
        # Answers made without any draft are equal by construction.
        tested = Verdict.PASS if drafts else Verdict.NOT_TESTED
        results.append(
            {
                "name": arm.name,
                "k": arm.k,
                "questions": total,
                "tokens": sum(len(ids) for answer in answers for ids in answer.token_ids),
                "drafts": drafts,
                "accepted": sum(record.accepted for record in rounds),
                "identical": total - len(verdicts),
                "near_ties": sum(v.allowed for v in verdicts),
                "defects": defects,
                "divergences": [{**asdict(v), "behind": None if v.behind == math.inf else v.behind} for v in verdicts],
                "verdict": Verdict.FAIL if defects else tested,
                "logprob_difference": apart,
            }
        )
    return {"definition": VERDICT, "arms": results, "verdict": together(result["verdict"] for result in results)}
