"""One model of the sweep: its tokens through the public API against its own, and a verdict."""

from __future__ import annotations

import copy
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks.sweep_configs import VOCAB, Case
from benchmarks.sweep_models import NotBuilt, NumberTokenizer, ScriptedHead, build, eager_copy, prompts_of
from specdec import SamplingParams, SpeculativeModel
from specdec.errors import ModelLoadError, SpecdecError, SpecdecWarning
from specdec.wrapped.long_rope import find_long_rope
from specdec.wrapped.target import placeholders

Outcome = Literal[
    "exact", "exact, limited", "near ties", "refused", "WRONG", "unnamed exception", "not built", "crashed", "timed out"
]
BAD: tuple[Outcome, ...] = ("WRONG", "unnamed exception", "crashed", "timed out")
PROMPT_LENS = (5, 20, 37, 90)
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
        outcome: "exact": all tokens are the model's own; "exact, limited": so, up to `limit` tokens, and longer
            requests are refused by name; "near ties": they are, but for divergences within rounding; "refused": by a
            named error. reason: of anything else and of a limit, in one line; notes: what else should be known.
        recurrent: True for a model with recurrent layers, else None.
        near_ties: divergences within rounding. worst: the largest of all divergences, in rounding
            errors. accepted: share of the drafts that were accepted.
    """

    outcome: Outcome
    reason: str = ""
    notes: str = ""
    near_ties: int = 0
    worst: float = 0.0
    accepted: float | None = None
    limit: int | None = None
    recurrent: bool | None = None


@dataclass(frozen=True)
class Plan:
    """What is asked of a model.

    Attributes:
        target: what specdec loads: the model, or the folder of a wrapper; on `device`. load: its options. prompts, new:
            prompts that fit its longest request, and new tokens of each. limit, why: that length, where it is shorter
            than what all prompts need, and specdec's reason. vocab_size, num_layers, recurrent: as specdec sees them.
            eager: specdec warns that the model's default attention leaves out what its layers ask for; eager attention
            is what it is compared with.
    """

    target: Any
    device: torch.device
    load: dict[str, Any]
    prompts: list[list[int]]
    new: int = NEW_TOKENS
    limit: int | None = None
    why: str = ""
    vocab_size: int = VOCAB
    num_layers: int = 1
    recurrent: bool | None = None
    eager: bool = False


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

    def __init__(
        self, model: PreTrainedModel, finer: PreTrainedModel | None, prompts: list[list[int]], new: int = NEW_TOKENS
    ) -> None:
        """finer: a float32 copy of a model in half precision; None for one in float32. The answers are those of its
        default attention; a note says where eager attention gives others."""
        self._model, self._finer, self._new = model, finer, new
        rope = find_long_rope(model)
        self._keeps_cache = rope is not None and not rope.rule.rereads
        self.notes: dict[str, None] = {}
        self.answers = [self._answer(model, prompt) for prompt in prompts]
        if finer is None:
            self._compare_eager(prompts)

    @property
    def note(self) -> str:
        """All notes."""
        return "; ".join(self.notes)

    def _compare_eager(self, prompts: list[list[int]]) -> None:
        eager = eager_copy(self._model)
        for prompt, answer in zip(prompts, self.answers, strict=True):
            other = self._answer(eager, prompt)
            at = first_difference(answer, other)
            if at is not None and self.excess(prompt, answer, at, other[at]) > _MOST_ERRORS:
                self.notes["its eager attention gives other tokens than its default one"] = None

    def excess(self, prompt: list[int], answer: Sequence[int], at: int, token: int) -> float:
        """By how many rounding errors `token` is worse than the best after the prompt and `at` tokens of the answer."""
        text = [*prompt, *answer[:at]]
        own = self._logits(self._model, text, len(prompt))
        fine = own if self._finer is None else self._logits(self._finer, text, len(prompt))
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
        return any(self._rounded_choice(text, len(prompt), amplitude, run) == token for run in range(_ROUNDINGS))

    def _rounded_choice(self, text: list[int], prompt_len: int, amplitude: float, run: int) -> int:
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
            return int(self._logits(self._finer, text, prompt_len)[-1].argmax())
        finally:
            for hook in hooks:
                hook.remove()

    def _answer(self, model: PreTrainedModel, prompt: list[int]) -> list[int]:
        """Cached greedy `generate`; where that contradicts the uncached forward, greedy tokens of the latter.

        But for a longrope model that keeps its cache when its factors change: there only the cached one is meant.
        """
        ids = torch.tensor([prompt], device=model.device)
        arguments = {"max_new_tokens": self._new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        answer = model.generate(ids, **arguments)[0, len(prompt) :].tolist()
        if self._keeps_cache:
            return answer
        said = self._logits(model, [*prompt, *answer[:-1]], len(prompt))[len(prompt) - 1 :].argmax(-1).tolist()
        at = first_difference(answer, said)
        if at is None or self.excess(prompt, answer, at, answer[at]) <= _MOST_ERRORS:
            return answer
        self.notes["its own cached generate differs from its own forward, which is what is compared with"] = None
        return self._uncached(model, prompt)

    def _uncached(self, model: PreTrainedModel, prompt: list[int]) -> list[int]:
        text = list(prompt)
        for _ in range(self._new):
            text.append(int(self._logits(model, text, len(prompt))[-1].argmax()))
        return text[len(prompt) :]

    def _logits(self, model: PreTrainedModel, text: list[int], prompt_len: int) -> torch.Tensor:
        """[T, V] float32, of the whole text at once; of a longrope model whose cached keys keep their factors as its
        `generate` reads it, token by token after the prompt: at once, the long factors would be those of all."""
        ends = [*range(prompt_len, len(text) + 1)] if self._keeps_cache else [len(text)]
        ids, cache, found = torch.tensor([text], device=model.device), None, []
        for start, stop in zip([0, *ends], ends, strict=False):
            how = {"past_key_values": cache, "use_cache": True} if self._keeps_cache else {"use_cache": False}
            output = model(input_ids=ids[:, start:stop], attention_mask=torch.ones_like(ids[:, :stop]), **how)
            cache, found = output.get("past_key_values"), [*found, output.logits[0].float()]
        return torch.cat(found)


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
    try:
        whole = build(case)
    except NotBuilt as error:
        return Verdict("not built", one_line(error))
    except SpecdecError as error:
        return Verdict("refused", one_line(error))
    model = whole.to(dtype).to(device)  # type: ignore[arg-type]
    finer = None if dtype == torch.float32 else copy.deepcopy(model).float()
    with tempfile.TemporaryDirectory() as folder:
        try:
            target, load = _target(case, model, folder)
        except Exception as error:  # transformers validates a configuration again before it writes it
            return Verdict("not built", f"its miniature cannot be saved: {one_line(error)}")
        return _checked(model, finer, target, load)


def _target(case: Case, model: PreTrainedModel, folder: str) -> tuple[Any, dict[str, Any]]:
    """What specdec loads, and with which options: a wrapper is written to the folder and read from it."""
    if case.wrapper is None:
        return model, dict(case.load)
    model.save_pretrained(folder)
    return folder, {"dtype": model.dtype, "device": str(model.device), **case.load}


def _checked(model: PreTrainedModel, finer: PreTrainedModel | None, target: Any, load: dict[str, Any]) -> Verdict:
    embedding: Any = model.get_input_embeddings()
    prompts = prompts_of(PROMPT_LENS, 0, min(VOCAB, len(embedding.weight)), placeholders(model.config))
    plan = Plan(target, model.device, load, prompts)
    try:
        plan = _fitting(plan)
    except ModelLoadError as error:
        if target is model:
            return Verdict("refused", one_line(error))
        reason = one_line(error).replace(str(target), "its folder")
        return Verdict("not built", f"its miniature does not load again: {reason}")
    except SpecdecError as error:
        broken = _broken_miniature(model)
        return Verdict("refused", one_line(error)) if broken is None else Verdict("not built", broken)
    except Exception as error:
        return _unnamed(error, model, finer, prompts)
    try:
        reference = Reference(eager_copy(model) if plan.eager else model, finer, plan.prompts, plan.new)
        if plan.eager:
            reference.notes["specdec warns that its default attention leaves out its softcap: eager is compared"] = None
    except Exception as error:
        return Verdict("not built", f"its own generate fails: {one_line(error)}")
    try:
        return _compared(plan, reference)
    except SpecdecError as error:
        return Verdict("refused", one_line(error), reference.note)
    except Exception as error:
        return Verdict("unnamed exception", one_line(error), reference.note)


def _fitting(plan: Plan) -> Plan:
    """Prompts and new tokens that fit the longest request; where these are fewer, why. Longer requests are tried, too.

    Raises:
        SpecdecError: the model is refused.
        AssertionError: a longer request is not.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", SpecdecWarning)
        loaded = _load(plan, None, 0)
    plan = replace(plan, eager=any("attn_implementation='sdpa'" in str(warning.message) for warning in said))
    with loaded as wrapped:
        limit = wrapped.config.max_model_len
        plan = replace(plan, vocab_size=wrapped.target.vocab_size, num_layers=wrapped.target.num_layers)
        plan = replace(plan, recurrent=wrapped.target.states is not None or None)
        if max(map(len, plan.prompts)) + plan.new <= limit:
            return plan
        too_long = (plan.prompts[-1] * limit)[:limit]
        _refusal(lambda: wrapped.generate([too_long]))
    new = min(NEW_TOKENS, limit // 2)
    lens = [n for n in PROMPT_LENS if n + new < limit]
    prompts = [*plan.prompts[: len(lens)], plan.prompts[-1][: limit - new]]
    longer = replace(plan, load=plan.load | {"max_model_len": limit + 1})
    return replace(plan, prompts=prompts, new=new, limit=limit, why=_refusal(lambda: _load(longer, None, 0)))


def _refusal(call: Callable[[], object]) -> str:
    """The named error that a call ends in, in one line."""
    try:
        call()
    except SpecdecError as error:
        return one_line(error)
    raise AssertionError("a request beyond the longest was not refused")


def _broken_miniature(model: PreTrainedModel) -> str | None:
    """Why the model itself, so small, cannot read four tokens; not where it misses an input, such as an image."""
    try:
        model(input_ids=torch.arange(8, 12, device=model.device)[None])
    except RuntimeError as error:
        return f"its own forward fails: {one_line(error)}"
    except Exception:
        return None
    return None


def _unnamed(error: Exception, model: Any, finer: Any, prompts: list[list[int]]) -> Verdict:
    """An exception that is no error of ours: the model's own fault where it does not run without us either."""
    try:
        Reference(model, finer, prompts)
    except Exception as own:
        return Verdict("not built", f"its own generate fails: {one_line(own)}")
    return Verdict("unnamed exception", one_line(error))


def _compared(plan: Plan, reference: Reference) -> Verdict:
    prompts = plan.prompts
    texts = [p + a for p, a in zip(prompts, reference.answers, strict=True)]
    found: list[Divergence] = []
    drafted = accepted = 0
    for drafts in _CHUNKS:
        params = SamplingParams(max_new_tokens=plan.new)
        with _load(plan, texts, drafts) as wrapped:
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
    right: Outcome = "exact" if plan.limit is None else "exact, limited"
    outcome: Outcome = "WRONG" if wrong else "near ties" if found else right
    reason = f"{len(wrong)} answers of {4 * len(prompts)}; {wrong[0]}" if wrong else plan.why
    return Verdict(outcome, reason, reference.note, len(found) - len(wrong), worst, share, plan.limit, plan.recurrent)


def _judged(
    reference: Reference, prompt: list[int], answer: list[int], tokens: list[int], at: int, where: str
) -> Divergence:
    if at >= min(len(answer), len(tokens)):
        return Divergence(f"{where} (an answer ends early)", at, float("inf"), True)
    excess = reference.excess(prompt, answer, at, tokens[at])
    explained = excess <= _MOST_ERRORS or reference.within_rounding(prompt, answer, at, tokens[at])
    return Divergence(where, at, excess, not explained)


def _load(plan: Plan, texts: list[list[int]] | None, drafts: int) -> SpeculativeModel:
    """The wrapped model, with a head that knows the texts where it is to draft."""
    options: dict[str, Any] = {"tokenizer": NumberTokenizer(), "backend": "torch", "page_size": 4, **plan.load}
    sizes = {"max_num_seqs": len(PROMPT_LENS), "max_num_batched_tokens": _CHUNKS[drafts], "kv_cache_tokens": 640}
    load = partial(SpeculativeModel.from_pretrained, plan.target, **options, **sizes)
    if not drafts or texts is None:
        return load()
    head = ScriptedHead(texts, plan.vocab_size, (1, plan.num_layers // 2, plan.num_layers), plan.device)
    return load(head, num_speculative_tokens=drafts)


def one_line(error: BaseException) -> str:
    """An error's class and message in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
