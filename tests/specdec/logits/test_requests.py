"""Requests with options that change logits, beside requests without: greedy tokens are those of transformers' generate
with the same options, in every pipeline, with preemptions and interrupts; and planted defects are seen."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes import VOCAB, count_calls, tiny_llama
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec.acceptance.accept import SampledInputs, accept_sampled
from specdec.engine.engine import Engine
from specdec.execution.ragged import RaggedTarget
from specdec.logits import extra as extras
from specdec.logits import forms
from specdec.logits.extra import OptionColumns
from specdec.logits.forms import TokenPrefixes
from specdec.requests.sampling import SamplingArrays, SamplingParams
from specdec.rounds.extras import RoundExtra
from specdec.rounds.fixed import FixedTarget
from specdec.rounds.randomness import SamplingRound, request_key
from tests.specdec.execution.test_graphs import FixedPlaceBackend, graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.rounds.test_extras import PROMPTS, answers, engine_with

NEW = 20
EOS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "frequency_penalty": {"frequency_penalty": 0.4},
    "presence_penalty": {"presence_penalty": 1.2},
    "logit_bias": {"logit_bias": {5: 3.0, 7: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, VOCAB, 2))},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "sequence_bias": {"sequence_bias": {(4,): 2.0, (6, 38): -6.0, (32, 6, 38): 5.0}},
    "bad_words_ids": {"bad_words_ids": [[4], [6, 38], [51, 43, 29], [EOS]]},
    "min_new_tokens": {"min_new_tokens": 15, "logit_bias": {EOS: 4.0}},
    "min_length": {"min_length": 30, "logit_bias": {EOS: 4.0}},
    "forced_bos_token_id": {"forced_bos_token_id": 6},
    "forced_eos_token_id": {"forced_eos_token_id": 6},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.5)},
    "suppress_tokens": {"suppress_tokens": list(range(0, VOCAB, 3))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, VOCAB, 2))},
    "remove_invalid_values": {"remove_invalid_values": True, "suppress_tokens": [1, 2]},
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "sequence_bias": {(6, 38): -6.0},
        "exponential_decay_length_penalty": (9, 1.1),
        "begin_suppress_tokens": [8],
    },
    "with OpenAI's": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "logit_bias": {EOS: 3.0},
        "sequence_bias": {(6, 38): -6.0},
        "exponential_decay_length_penalty": (9, 1.1),
        "begin_suppress_tokens": [8],
    },
}
OF_OPENAI = ("frequency_penalty", "presence_penalty", "logit_bias", "allowed_token_ids")
"""Options that transformers does not have."""


class OpenAI(LogitsProcessor):
    """Options that transformers does not have, as OpenAI's and vLLM's documentation states them."""

    def __init__(self, prompt_len: int, options: Mapping[str, Any]) -> None:
        self.prompt_len, self.options = prompt_len, options

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, bias in dict(self.options.get("logit_bias", {})).items():
            scores[0, token] += bias
        new = input_ids[0, self.prompt_len :].tolist()
        for token in set(new):
            scores[0, token] -= new.count(token) * self.options.get("frequency_penalty", 0.0)
            scores[0, token] -= self.options.get("presence_penalty", 0.0)
        allowed = self.options.get("allowed_token_ids")
        if allowed is not None:
            scores[0, [t for t in range(scores.shape[1]) if t not in allowed]] = float("-inf")
        return scores


def processors_of(options: Mapping[str, Any], prompt: Sequence[int]) -> LogitsProcessorList:
    """transformers' processors for these options, in the order of its generate, with OpenAI's where vLLM has them."""
    own, ends = dict(options), torch.tensor([EOS])
    every: list[Any] = []
    if "sequence_bias" in own:
        every.append(hf.SequenceBiasLogitsProcessor(dict(own["sequence_bias"])))
    every.append(OpenAI(len(prompt), {k: own[k] for k in own if k == "logit_bias"}))
    if "repetition_penalty" in own:
        every.append(hf.RepetitionPenaltyLogitsProcessor(own["repetition_penalty"]))
    every.append(OpenAI(len(prompt), {k: own[k] for k in own if k in ("frequency_penalty", "presence_penalty")}))
    for name, make in (
        ("no_repeat_ngram_size", hf.NoRepeatNGramLogitsProcessor),
        ("min_length", lambda least: hf.MinLengthLogitsProcessor(least, ends)),
        ("min_new_tokens", lambda least: hf.MinNewTokensLengthLogitsProcessor(len(prompt), least, ends)),
        (
            "exponential_decay_length_penalty",
            lambda decay: hf.ExponentialDecayLengthPenalty(decay, ends, len(prompt)),
        ),
        ("suppress_tokens", hf.SuppressTokensLogitsProcessor),
        ("begin_suppress_tokens", lambda ids: hf.SuppressTokensAtBeginLogitsProcessor(ids, len(prompt))),
        ("temperature", hf.TemperatureLogitsWarper),
        ("top_h", hf.TopHLogitsWarper),
        ("top_k", hf.TopKLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
        ("min_p", hf.MinPLogitsWarper),
        ("typical_p", hf.TypicalLogitsWarper),
        ("epsilon_cutoff", hf.EpsilonLogitsWarper),
        ("eta_cutoff", hf.EtaLogitsWarper),
    ):
        if name in own:
            every.append(make(own[name]))  # type: ignore[operator]
    return LogitsProcessorList(every)


@functools.cache
def oracle(prompt: tuple[int, ...], name: str | None) -> list[int]:
    """Greedy tokens of transformers alone: by its own options, but for those that it does not have."""
    options = {} if name is None else dict(OPTIONS[name])
    ours = {key: options[key] for key in options if key in OF_OPENAI}
    theirs = {key: value for key, value in options.items() if key not in ours}
    if ours and theirs:  # OpenAI's stand among transformers' own
        own, theirs = processors_of(options, prompt), {}
    else:
        own = LogitsProcessorList([OpenAI(len(prompt), ours)])
    if "sequence_bias" in theirs:
        theirs["sequence_bias"] = [[list(ids), bias] for ids, bias in theirs["sequence_bias"].items()]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=EOS, pad_token_id=0, **theirs)
    ids = torch.tensor([prompt])
    said = tiny_llama().generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=own
    )
    return list(said[0, len(prompt) :].tolist())


def right(names: list[str | None]) -> list[list[int]]:
    return [oracle(tuple(prompt), name) for prompt, name in zip(PROMPTS, names, strict=True)]


def params_of(names: list[str | None]) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=NEW, **({} if name is None else OPTIONS[name])) for name in names]


def ending_at_eos(engine: Engine) -> None:
    engine.submit = functools.partial(engine.submit, eos_token_ids=(EOS,))  # type: ignore[method-assign]


def said(names: list[str | None], drafts: int, graphs: bool, interrupts: Any = (), **options: Any) -> list[list[int]]:
    engine = engine_with(drafts, graphs, RoundExtra(), **options)
    ending_at_eos(engine)
    return [c.token_ids for c in answers(engine, params_of(names), interrupts)]


SLOW = {name: () if name in ("several", "with OpenAI's") else (pytest.mark.slow,) for name in OPTIONS}
EVERY = [pytest.param([name] * len(PROMPTS), id=name, marks=SLOW[name]) for name in OPTIONS]
MIXED = [[None, "with OpenAI's", "repetition_penalty", None, "no_repeat_ngram_size", "min_new_tokens"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.thorough
def test_every_option_changes_some_answer(name: str) -> None:
    """Otherwise equal answers say nothing."""
    if name != "remove_invalid_values":
        assert right([name] * len(PROMPTS)) != right([None] * len(PROMPTS))


@pytest.mark.parametrize("names", [*EVERY, *(pytest.param(names, id="mixed") for names in MIXED)])
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.cases(1)
def test_tokens_are_transformers(names: list[str | None], drafts: int) -> None:
    """Each option under drafts; without them `test_without_drafts_they_are_too` has all options in one batch."""
    assert said(names, drafts, False) == right(names)


@pytest.mark.slow
@pytest.mark.thorough
def test_without_drafts_they_are_too() -> None:
    """All options in batches of six."""
    every = [name for name in OPTIONS if name != "several"]
    for start in range(0, len(every), len(PROMPTS)):
        names: list[str | None] = [*every[start : start + len(PROMPTS)], *[None] * len(PROMPTS)][: len(PROMPTS)]
        assert said(names, 0, False) == right(names), names


@pytest.mark.slow
@pytest.mark.parametrize("names", [["several"] * 6, *MIXED], ids=["several", "mixed"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.cases(1)
def test_tokens_from_graphs_are_too(
    names: list[str | None],
    drafts: int,
    graphs_on_cpu: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds with options keep their form, also when launched before the commit or before the read of the last one."""
    ragged, fixed = count_calls(monkeypatch, RaggedTarget, "logits"), count_calls(monkeypatch, FixedTarget, "send")
    after = count_calls(monkeypatch, OptionColumns, "after")
    assert said(names, drafts, True) == right(names)
    assert len(fixed) > len(ragged) and after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [(3, False), (0, True), *(pytest.param(*own, marks=pytest.mark.long) for own in ((0, False), (3, True)))],
)
@pytest.mark.cases(1)
def test_rows_that_are_opened_again_keep_their_options(drafts: int, graphs: bool, request: Any) -> None:
    """After preemptions, and after interrupts."""
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    names: list[str | None] = ["several", "repetition_penalty", "frequency_penalty", None, "several", "min_new_tokens"]
    assert said(names, drafts, graphs, (4, 9), kv_cache_tokens=88, max_num_seqs=6) == right(names)


def _committed_only(cls: Any, committed: Any, lens: Any, prompts: Any, owner: Any, followed: Any, there: Any) -> Any:
    there = there & (torch.arange(there.shape[1]) == 0)
    return PLAIN(committed, lens, prompts, owner, followed, there)


def _last_twice(scores: torch.Tensor, prefixes: TokenPrefixes, frequency: Any, presence: Any) -> None:
    ids = torch.cat([prefixes.ids, prefixes.tails(1)], 1)
    forms.subtract_counts(scores, TokenPrefixes(ids, prefixes.lens + 1, prefixes.prompt_lens), frequency, presence)


def _one_row_later(own: Any, round_: Any, at: torch.Tensor) -> Any:
    rows = ROWS(own, round_, at)
    later = [max(0, n - 1) for n in range(len(rows.subjects))]
    return extras.LogitsRows(rows.subjects, rows.lens[later], rows.prefixes.rows(torch.tensor(later)))


def _stale_rows(own: Any, round_: Any, at: torch.Tensor) -> Any:
    """The history without the last round's tokens, as if it were brought up to date once for a round."""
    for row, length in zip(own.committed, own.lens, strict=True):
        row[max(1, length - 3) : length] = 0
    return ROWS(own, round_, at)


PLAIN, ROWS = TokenPrefixes.of, extras.rows_of
DEFECTS: dict[str, tuple[str, Any]] = {
    "drafted prefix not counted": ("several", (TokenPrefixes, "of", classmethod(_committed_only))),
    "last token counted twice": ("frequency_penalty", ("specdec.logits.processing.subtract_counts", _last_twice)),
    "mask of position i at i + 1": ("no_repeat_ngram_size", (extras, "rows_of", _one_row_later)),
    "history without the last round": ("frequency_penalty", (extras, "rows_of", _stale_rows)),
}


@pytest.mark.long
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_seen(defect: str, graphs: bool, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    name, planted = DEFECTS[defect]
    monkeypatch.setattr(*planted)
    names: list[str | None] = [name] * len(PROMPTS)
    assert said(names, 3, graphs) != right(names)


def test_drafts_are_accepted_under_options() -> None:
    """A test in which no draft is ever accepted would say nothing about drafted prefixes."""
    engine = engine_with(3, False, RoundExtra())
    rounds = [r for c in answers(engine, params_of(["several"] * 6)) for r in c.stats.rounds if r.drafted]
    assert np.mean([r.accepted / r.drafted for r in rounds]) > 0.1


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.9, "typical_p": 0.7},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "eta_cutoff": 0.02},
    {"temperature": 1.1, "top_h": 0.6, "repetition_penalty": 1.3},
    {"temperature": 0.8, "min_p": 0.05, "epsilon_cutoff": 0.02, "no_repeat_ngram_size": 2},
    {"temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.2, "min_new_tokens": 10},
    {"temperature": 1.0, "top_k": 12, "suppress_tokens": [6, 9], "sequence_bias": {(6, 38): -4.0}},
]


def sampled_oracle(prompt: list[int], completion: Any, options: Mapping[str, Any], seed: int) -> list[int]:
    """What each round of a request decides by speculative sampling from transformers' own distribution."""
    model, processors, said = tiny_llama(), processors_of(options, prompt), list(prompt)
    own, key = SamplingArrays.of([SamplingParams()]), np.array([request_key(seed, 0)], np.uint64)
    for drafts in ((), *completion.drafts):
        n = len(drafts)
        ids = torch.tensor([[*said, *drafts]])
        logits = model(ids, use_cache=False).logits[0, len(said) - 1 :]
        rows = [processors(ids[:, : len(said) + i], logits[i : i + 1].clone()) for i in range(n + 1)]
        uniforms = SamplingRound(own, key, np.array([len(said)]), 1, 1, n)
        accept, following = uniforms.accept_uniforms(n), uniforms.next_uniforms(n + 1)
        p = torch.cat(rows).softmax(-1)[None]
        inputs = SampledInputs(p, None, torch.from_numpy(accept), torch.from_numpy(following))
        result = accept_sampled(torch.tensor([drafts], dtype=torch.int64).reshape(1, n), torch.tensor([n]), inputs)
        said += [*drafts[: int(result.num_accepted[0])], int(result.next_token[0])]
    new = said[len(prompt) :][:NEW]
    return new[: new.index(EOS) + 1] if EOS in new else new


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [(0, False), (3, True), *(pytest.param(*n, marks=pytest.mark.long) for n in ((3, False), (0, True)))],
)
@torch.no_grad()
@pytest.mark.thorough
def test_sampled_tokens_are_decided_by_transformers_distribution(drafts: int, graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    params = [SamplingParams(NEW, seed=i, return_drafts=True, **own) for i, own in enumerate(SAMPLED)]
    engine = engine_with(drafts, graphs, RoundExtra(), draft_sampling="greedy")
    ending_at_eos(engine)
    completions = answers(engine, params)
    said = [c.token_ids for c in completions]
    every = zip(PROMPTS, completions, SAMPLED, strict=True)
    assert said == [sampled_oracle(prompt, own, options, i) for i, (prompt, own, options) in enumerate(every)]
    if drafts:
        assert np.mean([r.accepted / r.drafted for c in completions for r in c.stats.rounds if r.drafted]) > 0.02


@pytest.mark.slow
@pytest.mark.thorough
def test_a_decay_beyond_float64_ends_no_round() -> None:
    """Of an end that may not come: where it may, it came long before."""
    own = SamplingParams(40, exponential_decay_length_penalty=(0, 1e10), stop_token_ids=(EOS,), suppress_tokens=(EOS,))
    plain = SamplingParams(40, suppress_tokens=(EOS,), stop_token_ids=(EOS,))
    found = [c.token_ids for c in answers(engine_with(3, False, RoundExtra()), [own, plain] * 3)]
    assert found == [c.token_ids for c in answers(engine_with(3, False, RoundExtra()), [plain] * 6)]
