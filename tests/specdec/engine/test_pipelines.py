"""What happens in which order in a round of each pipeline, with an executor that only notes what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import specdec.engine.engine
from drafters.loops.base import Draft
from specdec.acceptance.packed import Outcome, PackedResult
from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.errors import InvalidInputError
from specdec.execution.base import ChainedVerification, DraftedVerification, Verification
from specdec.execution.readback import HostReads
from specdec.requests.sampling import SamplingParams
from specdec.rounds.verification import TargetArrays
from specdec.wrapped.group import ALONE

CPU = torch.device("cpu")
K = 2
TOKEN, EOS = 7, 9


class NotingExecutor:
    """Accepts every draft and says TOKEN, in rounds of verifications in one kind of pipeline, else in the plain one.

    prompts_too: rounds with prompts are of that kind, too.
    """

    def __init__(self, kind: type[Verification]) -> None:
        self.kind, self.transfers, self.prompts_too = kind, 0, False
        self.events: list[str] = []
        self.reads = HostReads(64, CPU)
        self.reads.after_read = self.read

    def read(self, outcome: Any, num_drafts: np.ndarray) -> Any:
        self.events.append("read")
        return outcome

    def send(self, draft: Any, target: TargetArrays, sampling: Any) -> TargetArrays:
        self.transfers += 1
        self.events.append("send")
        return target

    def draft(self, round_: TargetArrays, aux_hidden_states: torch.Tensor) -> Draft:
        self.events.append("draft loop")
        return Draft(torch.full((len(round_.start), K), TOKEN), None)

    def verify(self, round_: TargetArrays, draft: Draft | None) -> Verification:
        self.events.append("verify")
        packed = torch.full((len(round_.decided), 2 * round_.max_drafts + 2), TOKEN)
        packed[:, 0] = num_drafts = torch.from_numpy(round_.num_drafts)
        read, states = self.reads.start(PackedResult(packed), num_drafts), torch.zeros(0)
        if not (round_.only_bonus_tokens or self.prompts_too) or self.kind is Verification:
            return Verification(read, states)
        if self.kind is ChainedVerification:
            return ChainedVerification(read, states, self.launch_next)
        self.events.append("draft prefill")
        return DraftedVerification(read, states, self.steps)

    def steps(self, num_accepted: np.ndarray) -> Draft:
        self.events.append("draft steps")
        return Draft(torch.full((len(num_accepted), K), TOKEN), None)

    def launch_next(self, target: TargetArrays, sampling: Any) -> tuple[TargetArrays, Verification]:
        return self.send(None, target, None), self.verify(target, None)


def engine_of(kind: type[Verification], monkeypatch: pytest.MonkeyPatch, queue: bool = True, rows: int = 2) -> Engine:
    k = 0 if kind is ChainedVerification else K
    config = EngineConfig(k, 64, rows, 32, 4, 40)
    facts = {"num_embeddings": 50, "vocab_size": 50, "placeholders": {}, "group": ALONE}
    target: Any = SimpleNamespace(hf_model=SimpleNamespace(device=CPU), **facts)
    drafter: Any = SimpleNamespace(loop=SimpleNamespace(num_modules=1)) if k else None
    tokenizer: Any = SimpleNamespace(decode=lambda token_ids, **_: "")
    executor: Any = NotingExecutor(kind)
    engine = Engine(target, drafter, tokenizer, config, [EOS], executor)
    engine.use(executor, queue_verification=queue)
    commit = specdec.engine.engine.commit

    def noting(*args: Any) -> Any:
        executor.events.append("commit")
        return commit(*args)

    monkeypatch.setattr(specdec.engine.engine, "commit", noting)
    return engine


def decoding(engine: Engine, new_tokens: int = 40) -> list[str]:
    """Two requests, up to the round in which both decode; the list in which the following events will stand."""
    for _ in range(2):
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=new_tokens))
    for _ in range(3):
        engine.step()
    events: list[str] = engine.executor.events  # type: ignore[attr-defined]
    events.clear()
    return events


def test_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Verification, monkeypatch, queue=False)
    events = decoding(engine)
    engine.step()
    assert events == ["send", "draft loop", "verify", "read", "commit"]


def test_who_comes_between_two_rounds_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which computes nothing between two rounds."""
    engine = engine_of(Verification, monkeypatch, queue=False, rows=3)
    decoding(engine)
    new = engine.submit([4, 5], SamplingParams(max_new_tokens=9))
    assert [update.token_ids for update in engine.step() if update.request_id == new] == [[TOKEN]]


def test_plain_with_the_verification_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Verification, monkeypatch)
    events = decoding(engine)
    engine.step()
    assert events == ["read", "commit", "send", "draft loop", "verify"]


def test_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(DraftedVerification, monkeypatch)
    events = decoding(engine)
    engine.step()
    assert events == ["read", "draft steps", "send", "verify", "draft prefill", "commit"]


@pytest.mark.parametrize("reason", ["somebody waits", "an eos id", "no drafts are left"])
def test_drafted_where_who_is_next_is_open(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """The draft steps follow the read all the same; the next verification comes after the commit."""
    engine = engine_of(DraftedVerification, monkeypatch, rows=3)
    events = decoding(engine, new_tokens=11 if reason == "no drafts are left" else 40)
    if reason == "somebody waits":
        engine.submit([4, 5], SamplingParams(max_new_tokens=9))
    if reason == "an eos id":
        engine.executor.reads.after_read = ended
    engine.step()
    assert [e for e in events if e not in ("read", "draft prefill")] == ["draft steps", "commit", "send", "verify"]


def asked_for(monkeypatch: pytest.MonkeyPatch, prompts: int = 2, rows: int = 3) -> tuple[Engine, list[str]]:
    """An engine of drafted rounds, prompts too, that was given so many; what it does will stand in the list."""
    engine = engine_of(DraftedVerification, monkeypatch, rows=rows)
    engine.executor.prompts_too = True  # type: ignore[attr-defined]
    for _ in range(prompts):
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=12))
    return engine, engine.executor.events  # type: ignore[attr-defined]


def test_first_tokens_are_handed_out_before_the_next_round_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = asked_for(monkeypatch)
    assert [update.token_ids for update in engine.step()] == [[TOKEN]] * 2
    assert events == ["send", "verify", "draft prefill", "read", "commit"]
    events.clear()
    engine.step()
    assert events[:5] == ["draft steps", "send", "verify", "draft prefill", "read"]
    assert engine.stats.rounds == 3, "the next one is in flight again"


@pytest.mark.parametrize("reason", ["somebody waits", "somebody decodes", "a prompt is read on"])
def test_nobody_waits_for_a_first_token_of_others(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Where the device is waited for, or rows decode, the next round is launched before tokens are handed out."""
    engine, events = asked_for(monkeypatch, 3 if reason == "somebody waits" else 1, 2)
    if reason == "somebody decodes":
        engine.step()
        engine.step()
        engine.submit([4, 5], SamplingParams(max_new_tokens=9))
        while engine.scheduler.waiting:
            engine.step()
    if reason == "a prompt is read on":
        engine.submit(list(range(1, 41)), SamplingParams(max_new_tokens=9))
    events.clear()
    assert engine.step()
    assert events[-3:] == ["send", "verify", "draft prefill"]


def test_what_was_not_launched_yet_is_forgotten_with_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = asked_for(monkeypatch)
    aborted = engine.step()
    events.clear()
    engine.abort([aborted[0].request_id])
    engine.step()
    assert events[:2] == ["draft steps", "send"] and [r.id for r in engine.scheduler.running] == [aborted[1].request_id]
    engine.abort([aborted[1].request_id])
    assert engine.inflight is None and not engine.has_work and engine.scheduler.idle
    engine, events = asked_for(monkeypatch)
    engine.abort([update.request_id for update in engine.step()])
    assert engine.inflight is None
    events.clear()
    assert engine.step() == [] and events == []


def test_what_callers_have_to_do_is_done_while_the_device_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, before the first read after it was given; again where it was interrupted."""
    engine, events = asked_for(monkeypatch)

    def interrupted() -> None:
        engine.meanwhile[0] = lambda: events.append("check")
        raise KeyboardInterrupt

    engine.meanwhile.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert "read" not in events
    engine.step()
    assert events[-5:] == ["verify", "draft prefill", "check", "read", "commit"]
    engine.step()
    assert events.count("check") == 1


def ended(outcome: Outcome, num_drafts: np.ndarray) -> Outcome:
    """An eos id in the first row."""
    outcome.tokens[0, 1] = EOS
    return outcome


def test_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(ChainedVerification, monkeypatch)
    events = decoding(engine)
    engine.step()
    assert events == ["send", "verify", "read", "commit"]


def test_chained_where_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(ChainedVerification, monkeypatch, rows=3)
    events = decoding(engine)
    engine.submit([4], SamplingParams(max_new_tokens=9))
    engine.step()
    assert events == ["read", "commit", "send", "verify"]


@pytest.mark.parametrize("kind", [Verification, DraftedVerification, ChainedVerification])
@pytest.mark.parametrize(("queue", "prompts_too"), [(False, False), (True, False), (True, True)])
def test_every_pipeline_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, kind: type[Verification], queue: bool, prompts_too: bool
) -> None:
    engine, done = engine_of(kind, monkeypatch, queue), {}
    engine.executor.prompts_too = prompts_too and kind is DraftedVerification  # type: ignore[attr-defined]
    ids = [engine.submit([1, 2, 3], SamplingParams(max_new_tokens=n)) for n in (1, 5, 11, 30)]
    while engine.has_work:
        done |= {u.request_id: u.completion for u in engine.step() if u.completion is not None}
    assert [done[i].token_ids for i in ids] == [[TOKEN] * n for n in (1, 5, 11, 30)]
    assert engine.inflight is None and engine.scheduler.idle
    assert engine.stats.host_to_device == engine.stats.rounds >= engine.stats.device_to_host


def test_the_executor_is_not_replaced_under_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Verification, monkeypatch)
    engine.submit([1], SamplingParams(max_new_tokens=2))
    before = engine.executor
    with pytest.raises(InvalidInputError, match="1 requests are in the engine; abort them"):
        engine.use(NotingExecutor(Verification))
    assert engine.executor is before
