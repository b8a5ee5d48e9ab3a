"""One model of the sweep: its tokens through the public API against its own, and a verdict."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks.sweep_configs import Case
from benchmarks.sweep_models import NotBuilt, NumberTokenizer, ScriptedHead, build, prompts_of
from specdec import SamplingParams, SpeculativeModel
from specdec.errors import SpecdecError

Outcome = Literal["exact", "near ties", "refused", "WRONG", "unnamed exception", "not built", "crashed", "timed out"]
BAD: tuple[Outcome, ...] = ("WRONG", "unnamed exception", "crashed", "timed out")
PROMPT_LENS = (5, 37, 90)
NEW_TOKENS = 24
DRAFTS = 3
_CHUNKS = {0: 64, DRAFTS: 24}
"""Most tokens of a forward, by K: the longer prompts are read in chunks of both sizes."""
_MOST_ERRORS = 4.0
"""A divergence is wrong where the token is this many rounding errors of a difference of two logits below the best."""
_ROUNDINGS = 128
"""Runs with random rounding: mimo_v2_flash's jump, of a router whose two experts lie a rounding error apart, is in one
of 25; with 16 runs it was missed every other time."""
_HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest rounding of one number, relative."""
_FLOAT32_ROUNDING = 1e-5
"""Rounding error of a float32 logit, relative to the rms of the logits."""


@dataclass(frozen=True)
class Verdict:
    """What came of one model in one dtype.

    Attributes:
        outcome: "exact": all tokens are the model's own; "near ties": they are, but for divergences within rounding;
            "refused": by a named error. reason: of anything else, in one line; notes: what else should be known.
        near_ties: divergences within rounding. worst: the largest of all divergences, in rounding
            errors. accepted: share of the drafts that were accepted.
    """

    outcome: Outcome
    reason: str = ""
    notes: str = ""
    near_ties: int = 0
    worst: float = 0.0
    accepted: float | None = None


@dataclass(frozen=True)
class Divergence:
    """The first differing token of an answer.

    Attributes:
        excess: by how many rounding errors the token is worse than the best.
        wrong: whether that is more than rounding explains.
    """

    where: str
    position: int
    excess: float
    wrong: bool

    def __str__(self) -> str:
        return f"{self.where}, new token {self.position}: {self.excess:.3g} rounding errors below the best"


class Reference:
    """The model's own answers, one prompt at a time, and the same weights' logits in float32.

    The weights are those of the model as it is wrapped. Against a copy from before their rounding to half precision, an
    answer would be judged by another model: cohere2_moe's router then chose another expert, and the exact answer was
    called wrong.
    """

    def __init__(self, model: PreTrainedModel, finer: PreTrainedModel | None, prompts: list[list[int]]) -> None:
        """finer: a float32 copy of a model in half precision; None for one in float32."""
        self._model, self._finer = model, finer
        self.note = ""
        self.answers = [self._answer(prompt) for prompt in prompts]

    def excess(self, prompt: list[int], answer: Sequence[int], at: int, token: int) -> float:
        """By how many rounding errors `token` is worse than the best after the prompt and `at` tokens of the answer."""
        text = [*prompt, *answer[:at]]
        own = self._logits(self._model, text)
        fine = own if self._finer is None else self._logits(self._finer, text)
        error = fine.pow(2).mean().sqrt() * _FLOAT32_ROUNDING
        if self._finer is not None:
            error = (own - fine).pow(2).mean().sqrt()
        return float((fine[-1].max() - fine[-1, token]) / (error * 2**0.5))  # of two logits' difference

    def within_rounding(self, prompt: list[int], answer: Sequence[int], at: int, token: int) -> bool:
        """Whether the float32 copy says `token` there in any of some runs with each module's output rounded at random.

        A router between two experts that are nearly equal makes a jump of a rounding error, far beyond the rms: 81
        times in exaone_moe. Where roundings fall is chance, so chance is asked. Source: Monte Carlo arithmetic (Parker,
        1997).

        The noise of a run follows from the numbers that are rounded: one stream of noise for all of a run would depend
        on the order of calls, and mimo_v2_flash makes its rotations in the order of a set of strings, which differs
        between processes.
        """
        if self._finer is None:
            return False
        text, amplitude = [*prompt, *answer[:at]], _HALF_ULP[self._model.dtype]
        return any(self._rounded_choice(text, amplitude, run) == token for run in range(_ROUNDINGS))

    def _rounded_choice(self, text: list[int], amplitude: float, run: int) -> int:
        """The float32 copy's next token with every leaf module's output rounded at random; `run` is the seed."""
        assert self._finer is not None

        def rounded(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(rounded, x))
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            seed = zlib.crc32(x.float().contiguous().cpu().numpy().tobytes(), run)
            noise = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) - 1
            return x * (1 + amplitude * noise.to(x.device))

        leaves = [m for m in self._finer.modules() if next(m.children(), None) is None]
        hooks = [m.register_forward_hook(lambda module, inputs, output: rounded(output)) for m in leaves]
        try:
            return int(self._logits(self._finer, text)[-1].argmax())
        finally:
            for hook in hooks:
                hook.remove()

    def _answer(self, prompt: list[int]) -> list[int]:
        """Cached greedy `generate`; where that contradicts the uncached forward, greedy tokens of the latter."""
        ids = torch.tensor([prompt], device=self._model.device)
        arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        answer = self._model.generate(ids, **arguments)[0, len(prompt) :].tolist()
        said = self._logits(self._model, [*prompt, *answer[:-1]])[len(prompt) - 1 :].argmax(-1).tolist()
        at = first_difference(answer, said)
        if at is None or self.excess(prompt, answer, at, answer[at]) <= _MOST_ERRORS:
            return answer
        self.note = "its own cached generate differs from its own forward, which is what is compared with"
        return self._uncached(prompt)

    def _uncached(self, prompt: list[int]) -> list[int]:
        text = list(prompt)
        for _ in range(NEW_TOKENS):
            text.append(int(self._logits(self._model, text)[-1].argmax()))
        return text[len(prompt) :]

    def _logits(self, model: PreTrainedModel, text: list[int]) -> torch.Tensor:
        """[T, V] float32."""
        ids = torch.tensor([text], device=model.device)
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two answers begin to differ; None where they are equal.

    >>> first_difference([1, 2, 3], [1, 4, 3]), first_difference([1, 2], [1, 2, 3]), first_difference([1], [1])
    (1, 2, None)
    """
    pairs = enumerate(zip(a, b, strict=False))
    at = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at


@torch.no_grad()
def check(case: Case, dtype: torch.dtype, device: str) -> Verdict:
    """Build the case's model, run it both ways, and judge."""
    prompts = prompts_of(PROMPT_LENS)
    try:
        whole = build(case)
    except NotBuilt as error:
        return Verdict("not built", one_line(error))
    model = whole.to(dtype).to(device)  # type: ignore[arg-type]
    finer = None if dtype == torch.float32 else copy.deepcopy(model).float()
    try:
        _load(model, None, 0, case)
    except SpecdecError as error:
        return Verdict("refused", one_line(error))
    except Exception as error:
        return _unnamed(error, model, finer, prompts)
    try:
        reference = Reference(model, finer, prompts)
    except Exception as error:
        return Verdict("not built", f"its own generate fails: {one_line(error)}")
    try:
        return _compared(case, model, prompts, reference)
    except SpecdecError as error:
        return Verdict("refused", one_line(error), reference.note)
    except Exception as error:
        return Verdict("unnamed exception", one_line(error), reference.note)


def _unnamed(error: Exception, model: Any, finer: Any, prompts: list[list[int]]) -> Verdict:
    """An exception that is no error of ours: the model's own fault where it does not run without us either."""
    try:
        Reference(model, finer, prompts)
    except Exception as own:
        return Verdict("not built", f"its own generate fails: {one_line(own)}")
    return Verdict("unnamed exception", one_line(error))


def _compared(case: Case, model: PreTrainedModel, prompts: list[list[int]], reference: Reference) -> Verdict:
    texts = [p + a for p, a in zip(prompts, reference.answers, strict=True)]
    found: list[Divergence] = []
    drafted = accepted = 0
    for drafts in _CHUNKS:
        wrapped = _load(model, texts, drafts, case)
        params = SamplingParams(max_new_tokens=NEW_TOKENS)
        alone = [wrapped.generate([prompt], params)[0] for prompt in prompts]
        batched = wrapped.generate(prompts, params)
        for how, completions in (("alone", alone), ("in a batch", batched)):
            rounds = [r for c in completions for r in c.stats.rounds]
            drafted, accepted = drafted + sum(r.drafted for r in rounds), accepted + sum(r.accepted for r in rounds)
            for prompt, answer, completion in zip(prompts, reference.answers, completions, strict=True):
                at = first_difference(answer, completion.token_ids)
                if at is None:
                    continue
                where = f"K={drafts}, prompt of {len(prompt)} {how}"
                found.append(_judged(reference, prompt, answer, completion.token_ids, at, where))
    wrong = [d for d in found if d.wrong]
    share = accepted / drafted if drafted else None
    worst = max((d.excess for d in found), default=0.0)
    outcome: Outcome = "WRONG" if wrong else "near ties" if found else "exact"
    reason = f"{len(wrong)} answers of 12; {wrong[0]}" if wrong else ""
    return Verdict(outcome, reason, reference.note, len(found) - len(wrong), worst, share)


def _judged(
    reference: Reference, prompt: list[int], answer: list[int], tokens: list[int], at: int, where: str
) -> Divergence:
    if at >= min(len(answer), len(tokens)):
        return Divergence(f"{where} (an answer ends early)", at, float("inf"), True)
    excess = reference.excess(prompt, answer, at, tokens[at])
    explained = excess <= _MOST_ERRORS or reference.within_rounding(prompt, answer, at, tokens[at])
    return Divergence(where, at, excess, not explained)


def _load(model: PreTrainedModel, texts: list[list[int]] | None, drafts: int, case: Case) -> SpeculativeModel:
    """The wrapped model, with a head that knows the texts where it is to draft."""
    head = None
    if drafts and texts is not None:
        vocab = model(input_ids=torch.tensor([[9]], device=model.device), use_cache=False).logits.shape[-1]
        layers = int(model.config.get_text_config().num_hidden_layers)
        head = ScriptedHead(texts, vocab, (1, layers // 2, layers), model.device)
    return SpeculativeModel.from_pretrained(
        model,
        head,
        tokenizer=NumberTokenizer(),
        num_speculative_tokens=drafts,
        backend="torch",
        max_num_seqs=len(PROMPT_LENS),
        max_num_batched_tokens=_CHUNKS[drafts],
        page_size=4,
        kv_cache_tokens=512,
        **case.load,
    )


def one_line(error: BaseException) -> str:
    """An error's class and message in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
