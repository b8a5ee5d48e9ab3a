"""Training end to end on a tiny Llama: the head learns, a killed run goes on, the result can be loaded."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from attention.errors import InvalidInputError
from drafters.base import TargetFacts
from drafters.eagle3.checkpoint import fresh_eagle3, load_eagle, save_eagle3
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from drafters.errors import RunFolderError, TrainingDivergedError
from drafters.oracle import oracle_drafts
from drafters.training import lines_of_progress, trainer
from drafters.training.data import answer_set
from drafters.training.files import whole_folder
from drafters.training.objective import Features
from drafters.training.state import Measurement, TrainConfig, kept, stalled
from drafters.training.trainer import TrainingData
from drafters.training.trainer import train as train_any

SPEC = Eagle3Spec(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=48,
    draft_vocab_size=40,
    aux_layers=(1, 2, 3),
)
CONFIG = TrainConfig(
    steps=8,
    batch_size=4,
    ttt_steps=3,
    warmup_steps=2,
    learning_rate=3e-3,
    pad_multiple=8,
    held_out_every=4,
    checkpoint_every=3,
    log_every=2,
)


train = partial(train_any, save=save_eagle3)


class Killed(Exception):
    """Stands for a process that ends in the middle of a run."""


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=48, num_hidden_layers=4, **sizes))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def data(target: LlamaForCausalLM) -> TrainingData:
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, 48, (120, 4), generator=generator)

    def regenerate(asked: list[list[int]]) -> list[list[int]]:
        out = target.generate(
            torch.tensor(asked), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return out[:, 4:].tolist()

    train_set, held_out = answer_set(prompts.tolist(), regenerate(prompts.tolist()), max_length=16).split(20, seed=0)
    return TrainingData(train_set, held_out)


def facts(target: LlamaForCausalLM) -> TargetFacts:
    return TargetFacts(16, 48, 4, target.model.embed_tokens.weight, target.lm_head.weight)


def features_of(target: LlamaForCausalLM, calls: int = 10**9) -> Features:
    """Features from the model's own forward; the process is "killed" after so many calls."""
    left = iter(range(calls))

    def features(token_ids: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if next(left, None) is None:
            raise Killed
        out = target(token_ids, attention_mask=real.long(), output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[b] for b in SPEC.aux_layers], dim=-1), out.logits

    return features


def fresh(target: LlamaForCausalLM, data: TrainingData) -> Eagle3Head:
    return fresh_eagle3(SPEC, facts(target), data.train.token_counts(48), seed=4)


def quiet() -> Console:
    return Console(file=io.StringIO())


def nothing(head: Eagle3Head) -> Mapping[str, float]:
    return {}


def same(a: Eagle3Head, b: Eagle3Head) -> bool:
    states = a.state_dict(), b.state_dict()
    return all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_fresh_head_starts_from_the_targets_rows(target: LlamaForCausalLM, data: TrainingData) -> None:
    head = fresh(target, data)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[head.target_ids])
    assert head.target_embedding is not None
    assert head.target_embedding.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert same(head, fresh(target, data))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_head_learns_and_the_oracle_agrees(target: LlamaForCausalLM, data: TrainingData, tmp_path: Path) -> None:
    config = replace(CONFIG, steps=150, held_out_every=1000, checkpoint_every=1000, batch_size=16)
    head = fresh(target, data)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    console = Console(file=io.StringIO(), width=200)

    def drafted(trained: Eagle3Head) -> Mapping[str, float]:
        return {"right drafts": drafts_accepted(trained, target, data)}

    result = train(config, head, data, features_of(target), drafted, tmp_path, console)
    one = replace(config, steps=1)
    first = train(one, fresh(target, data), data, features_of(target), nothing, tmp_path / "one", quiet())
    learned, start = result.history[-1], first.history[-1]
    assert learned.acceptance[0] > start.acceptance[0] + 0.2
    assert learned.tau > start.tau + 0.3
    assert learned.evaluation["right drafts"] == pytest.approx(learned.tau - 1, abs=1e-6)
    assert "held-out acceptance" in console.file.getvalue() and "right drafts" in console.file.getvalue()  # type: ignore[attr-defined]
    assert all(torch.equal(tensor, target.state_dict()[name]) for name, tensor in before.items())
    loaded = load_eagle(result.folder, facts(target), torch.float32, "cpu")
    assert loaded.spec == SPEC and same(loaded, head)


def drafts_accepted(head: Eagle3Head, target: LlamaForCausalLM, data: TrainingData) -> float:
    """The held-out number again, from chains that the oracle drafts one by one: sum over i of P(drafts 1 … i right)."""
    features, right, chains = features_of(target), [0] * CONFIG.ttt_steps, [0] * CONFIG.ttt_steps
    for i in range(len(data.held_out)):
        ids = torch.from_numpy(data.held_out.sequence(i))
        aux_hidden_states, _ = features(ids[None], torch.ones(1, len(ids)))
        for bonus in range(int(data.held_out.answer_starts[i]), len(ids) - 1):
            drafts = oracle_drafts(head, ids[: bonus + 1], aux_hidden_states[0, :bonus], CONFIG.ttt_steps)
            wanted = ids[bonus + 1 : bonus + 1 + CONFIG.ttt_steps].tolist()
            for k in range(len(wanted)):
                chains[k] += 1
                right[k] += drafts[: k + 1] == wanted[: k + 1]
    return sum(r / c for r, c in zip(right, chains, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("calls", [pytest.param(4, marks=pytest.mark.long), 11])
def test_a_killed_run_goes_on_with_the_same_result(
    target: LlamaForCausalLM, data: TrainingData, tmp_path: Path, calls: int
) -> None:
    whole = fresh(target, data)
    expected = train(CONFIG, whole, data, features_of(target), nothing, tmp_path / "whole", quiet())
    with pytest.raises(Killed):
        train(CONFIG, fresh(target, data), data, features_of(target, calls), nothing, tmp_path / "cut", quiet())
    resumed = fresh(target, data)
    for parameter in resumed.parameters():
        torch.nn.init.zeros_(parameter)  # all of it must come from the checkpoint
    result = train(CONFIG, resumed, data, features_of(target), nothing, tmp_path / "cut", quiet())
    assert same(whole, resumed)
    assert result.history == expected.history
    names = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert names == ["head", "step-0000006", "step-0000008"]


@pytest.mark.long
def test_a_run_that_forgets_its_optimizer_is_seen(target: LlamaForCausalLM, data: TrainingData, tmp_path: Path) -> None:
    whole, cut = fresh(target, data), fresh(target, data)
    train(CONFIG, whole, data, features_of(target), nothing, tmp_path / "whole", quiet())
    with pytest.raises(Killed):
        train(CONFIG, cut, data, features_of(target, 4), nothing, tmp_path / "cut", quiet())
    saved = tmp_path / "cut" / "step-0000003" / "trainer.pt"
    state = torch.load(saved, weights_only=True)
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"].zero_()
    saved.unlink()
    with whole_folder(saved.parent) as anew:  # a checkpoint that was altered afterwards would be refused
        torch.save(state, anew / "trainer.pt")
    train(CONFIG, cut, data, features_of(target), nothing, tmp_path / "cut", quiet())
    assert not same(whole, cut)


PATIENT = replace(CONFIG, steps=40, held_out_every=2, checkpoint_every=7, keep_checkpoints=1, patience=2)


def measured_as(taus: list[float]) -> Callable[..., Measurement]:
    """Stands for `_measure`: these acceptance lengths in turn, by the step."""
    return lambda config, score, held_out, step, loss: Measurement(step, float(loss), (taus[step // 2 - 1] - 1,))


@pytest.mark.slow
def test_a_run_that_rises_no_more_ends_with_its_best_head(
    target: LlamaForCausalLM, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Best at step 6, by less than 0.01 over step 4. Killed anywhere, it goes on to the same head."""
    monkeypatch.setattr(trainer, "_measure", measured_as([1.2, 1.5, 1.505, 1.3, 1.9]))
    known = replace(PATIENT, steps=6, patience=None)
    until = fresh(target, data)
    monkeypatch.setattr(trainer, "get_cosine_schedule_with_warmup", lambda optimizer, *given: constant(optimizer))
    train(known, until, data, features_of(target), nothing, tmp_path / "known", quiet())
    console, evaluated = Console(file=io.StringIO(), width=200), []

    def evaluate(head: Eagle3Head) -> Mapping[str, float]:
        evaluated.append(same(head, until))
        return {"tau": 1.5}

    best = fresh(target, data)
    result = train(PATIENT, best, data, features_of(target), evaluate, tmp_path / "best", console, speedup=half)
    assert same(best, until) and evaluated == [True], "the head of step 6 has the highest acceptance length"
    assert [m.step for m in result.history] == [2, 4, 6, 8]
    assert [m.evaluation for m in result.history] == [{}, {}, {"tau": 1.5}, {}]
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ended after step 8 of 40; kept is the best head, of step 6 (τ 1.50)" in told
    assert "(τ 1.30, predicted speed-up 0.65 ×)" in told
    loaded = load_eagle(result.folder, facts(target), torch.float32, "cpu")
    assert same(loaded, until)
    for calls in (3, 4):  # in step 4, and after its checkpoint of step 2 in step 7
        with pytest.raises(Killed):
            train(PATIENT, fresh(target, data), data, features_of(target, calls), nothing, tmp_path / "cut", quiet())
    for _ in range(2):  # the second time it has ended before
        resumed = fresh(target, data)
        again = train(PATIENT, resumed, data, features_of(target), evaluate, tmp_path / "cut", quiet())
        assert same(resumed, until) and again.history == result.history
    assert evaluated == [True, True]


def test_the_best_checkpoint_stays_while_others_go(
    target: LlamaForCausalLM, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "_measure", measured_as([1.2, 1.5, 1.3, 1.4]))
    config = replace(PATIENT, patience=4, steps=8)
    result = train(config, fresh(target, data), data, features_of(target), nothing, tmp_path, quiet())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000004", "step-0000008"]
    assert [m.step for m in result.history] == [2, 4, 6, 8], "all steps were made"
    (tmp_path / "step-0000004" / "trainer.pt").write_bytes(b"")
    with pytest.raises(RunFolderError, match=r"step-0000004: trainer\.pt differs"):
        train(config, fresh(target, data), data, features_of(target), nothing, tmp_path, quiet())


def half(tokens: float) -> float:
    return tokens / 2


def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize(
    ("taus", "ended"),
    [([1.5], False), ([1.5, 1.4], False), ([1.5, 1.4, 1.51], True), ([1.5, 1.4, 1.511], False), ([1, 2, 2, 2], True)],
)
def test_a_rise_is_measured_against_all_before(taus: list[float], ended: bool) -> None:
    history = [Measurement(step, 0.0, (tau - 1,)) for step, tau in enumerate(taus)]
    assert stalled(TrainConfig(patience=2), history) == ended
    assert not stalled(TrainConfig(), history) and kept(TrainConfig(), history) is history[-1]
    assert kept(TrainConfig(patience=2), history).tau == max(taus)
    with pytest.raises(InvalidInputError, match="patience must be positive"):
        TrainConfig(patience=0)


@pytest.mark.slow
def test_checkpoints_of_other_answers_are_refused(target: LlamaForCausalLM, data: TrainingData, tmp_path: Path) -> None:
    train(CONFIG, fresh(target, data), data, features_of(target), nothing, tmp_path, quiet())
    other = TrainingData(data.train, data.train)
    with pytest.raises(InvalidInputError, match="learned from other answers"):
        train(CONFIG, fresh(target, data), other, features_of(target), nothing, tmp_path, quiet())


def test_a_diverging_run_stops(target: LlamaForCausalLM, data: TrainingData, tmp_path: Path) -> None:
    def broken(token_ids: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        aux_hidden_states, logits = features_of(target)(token_ids, real)
        return aux_hidden_states * float("nan"), logits

    with pytest.raises(TrainingDivergedError, match="step 2"):
        train(CONFIG, fresh(target, data), data, broken, nothing, tmp_path, quiet())
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(("steps", "warmup"), [(1500, 50), (60, 2), (10, 0)])
def test_the_warm_up_is_a_share_of_the_steps(steps: int, warmup: int) -> None:
    assert TrainConfig(steps=steps).warmup_steps == warmup
    assert TrainConfig(steps=steps, warmup_steps=7).warmup_steps == 7


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_of_progress, "LINE_S", 0.02)
    shown = {}
    for is_terminal in (False, True):
        console = Console(file=io.StringIO(), width=100, force_terminal=is_terminal)
        with trainer.TrainingDisplay(console, 60, 0) as display:
            display.show(completed=7, loss="3.210")
            time.sleep(0.2)
        shown[is_terminal] = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in shown[False].splitlines() if "7/60" in line and "loss 3.210" in line]
    assert len(lines) >= 3, shown
    assert shown[True].count("\n") == 1  # drawn over and over in its place
