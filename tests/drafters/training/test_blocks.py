"""Block-parallel heads are trained on what they do when they draft; they learn, and a killed run goes on."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from fakes import CPU, VOCAB, random_prompts, tiny_llama, wrap
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from drafters.block.spec import BlockSpec
from drafters.oracle import block_drafts, oracle_drafts
from drafters.training.blocks import LOSSES, LossWeights, block_outputs, chosen_anchors, evaluate_blocks
from drafters.training.data import AnswerSet, answer_set
from drafters.training.objective import calibration, collate, training_batches
from drafters.training.state import Measurement, TrainConfig
from drafters.training.trainer import TrainingDisplay, TrainResult
from evals.data.arithmetic import problems
from specdec.cli.train import train
from specdec.errors import InvalidInputError
from specdec.extensions.training import run
from specdec.extensions.training.run_folder import AnswerLimits, answer_prepared, locked, prepare_questions
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests
from tests.drafters.loops.block.test_rounds import made

KINDS = ["dflash", "dspark", "gated", "rnn", "window", "causal window", "fill-in with a chain", "confidence"]
CONFIDENCE = "confidence_head.proj"
LENGTHS, ANSWERS, DECAY = (19, 14, 9), (6, 11, 2), 0.7


class Rig:
    """Random sequences with random states of a target; of the second one three tokens are an answer."""

    def __init__(self, head: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        self.head, self.steps = head, head.block_size - head.first_slot
        prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
        pairs = zip(prompts, ANSWERS, strict=True)
        data = answer_set([p[:n] for p, n in pairs], [p[n:] for p, n in zip(prompts, ANSWERS, strict=True)], 64)
        self.batch = collate(data, torch.arange(3).numpy(), 1, CPU)
        shape = self.batch.token_ids.shape
        self.aux = torch.randn(*shape, head.spec.aux_size, generator=generator)
        self.outputs = torch.empty(0)
        self.logits = 3 * torch.randn(*shape, VOCAB, generator=generator)

    def drafted(self, row: int, anchor: int) -> tuple[Tensor, list[int]]:
        """Logits [n, V] of the drafts behind an anchor, by the head without a cache, as far as its answer goes, and
        these tokens. Each draft is replaced by the answer's token; `outputs` [n, H] are those of their slots."""
        ids = self.batch.token_ids[row]
        wanted = ids[anchor + 1 : LENGTHS[row]][: self.steps]
        seen: list[Tensor] = []

        def choose(position: int, logits: Tensor) -> Tensor:
            seen.append(logits[0])
            return ids[position : position + 1]

        def read(x: Tensor) -> Tensor:
            self.outputs = x
            return type(self.head).logits(self.head, x)

        with patch.object(self.head, "logits", read):
            block_drafts(self.head, ids[: anchor + 1], self.aux[row, :anchor], len(wanted), choose)
        return torch.stack(seen), wanted.tolist()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.cases(3)
def test_logits_are_those_of_drafting_from_the_same_prefix(name: str) -> None:
    rig = Rig(made(name))
    anchors, real = chosen_anchors(rig.batch, 8)
    places = (anchors[..., None] + torch.arange(1, rig.steps + 1)).clamp(max=rig.batch.token_ids.shape[1] - 1)
    wanted = rig.batch.token_ids[torch.arange(3)[:, None, None], places]
    _, found = block_outputs(rig.head, rig.batch.token_ids, rig.aux, anchors, wanted)
    assert real.sum() == 8 + 2 + 6
    for row, index in real.nonzero().tolist():
        expected, _ = rig.drafted(row, int(anchors[row, index]))
        torch.testing.assert_close(found[row, index, : len(expected)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [5, 100])
@pytest.mark.parametrize(
    "weights", [*LOSSES.values(), LossWeights(0.0, 1.0, 2.0)], ids=["dflash", "dspark", "distance"]
)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.cases(4)
def test_losses_and_counts_are_those_of_drafts_made_one_by_one(name: str, weights: LossWeights, count: int) -> None:
    rig = Rig(made(name))
    total, shares, accepted, possible = 0.0, 0.0, [0] * rig.steps, [0] * rig.steps
    rated: list[list[tuple[float, float]]] = [[] for _ in range(rig.steps)]
    anchors, real = chosen_anchors(rig.batch, count)
    for row, index in real.nonzero().tolist():
        anchor = int(anchors[row, index])
        logits, wanted = rig.drafted(row, anchor)
        drafts = oracle_drafts(rig.head, rig.batch.token_ids[row, : anchor + 1], rig.aux[row, :anchor], len(wanted))
        for j, token in enumerate(wanted):
            q, p = logits[j].softmax(-1), rig.logits[row, anchor + j].softmax(-1)
            loss = -weights.cross_entropy * math.log(q[token]) + weights.distance * float((q - p).abs().sum())
            if name == "confidence" and weights.confidence:
                before = int(rig.batch.token_ids[row, anchor + j])
                read = torch.cat((rig.outputs[j], rig.head.markov_head.markov_w1.weight[before]))
                weight, bias = rig.head.confidence_head.state_dict().values()
                sure, share = float((weight[0] @ read + bias).sigmoid()), 1 - float((q - p).abs().sum()) / 2
                loss -= weights.confidence * (share * math.log(sure) + (1 - share) * math.log(1 - sure))
                rated[j].append((sure, share))
            total, shares = total + DECAY**j * loss, shares + DECAY**j
            possible[j] += 1
            accepted[j] += drafts[: j + 1] == wanted[: j + 1]
    found = evaluate_blocks(
        rig.head, rig.batch, rig.aux, rig.logits, rig.steps, DECAY, num_anchors=count, weights=weights
    )
    assert found.possible.tolist() == possible and found.accepted.tolist() == accepted
    assert float(found.loss) == pytest.approx(total / shares, rel=1e-4)
    assert (found.rated is None) == (not any(rated))
    if found.rated is not None:
        for theirs, own in zip(found.rated.permute(2, 1, 0), rated, strict=True):
            there = theirs[theirs.isfinite().all(-1)]
            assert theirs.isnan().all(-1).sum() == len(theirs) - len(own)
            there = torch.stack((there[:, 0].sigmoid(), there[:, 1]), -1)[there[:, 0].argsort()]
            torch.testing.assert_close(there, torch.tensor(sorted(own)).reshape(-1, 2), rtol=1e-4, atol=1e-4)


def test_right_drafts_are_counted() -> None:
    """The answers are what the head drafts: all that fit are accepted, and one wrong token ends its blocks."""
    rig = Rig(made("dspark"))
    ids = rig.batch.token_ids
    for position in range(ANSWERS[0] + 1, LENGTHS[0]):
        prefix = ids[0, : ANSWERS[0] + 1], rig.aux[0, : ANSWERS[0]]
        drafts = oracle_drafts(rig.head, *prefix, rig.steps)
        if position - ANSWERS[0] <= rig.steps:
            ids[0, position] = drafts[position - ANSWERS[0] - 1]
    rig.batch.draws.zero_()
    rig.batch.draws[0, ANSWERS[0]] = 0.5  # the one that is drawn
    rig.batch.answer[1:] = False
    more = {"num_anchors": 1, "weights": LOSSES["dflash"]}
    found = evaluate_blocks(rig.head, rig.batch, rig.aux, rig.logits, rig.steps, DECAY, **more)
    assert found.accepted.tolist() == found.possible.tolist() == [1] * rig.steps
    ids[0, ANSWERS[0] + 3] = (ids[0, ANSWERS[0] + 3] + 1) % VOCAB
    found = evaluate_blocks(rig.head, rig.batch, rig.aux, rig.logits, rig.steps, DECAY, **more)
    assert found.accepted.tolist() == [1, 1] + [0] * (rig.steps - 2) and found.possible.tolist() == [1] * rig.steps


def test_anchors_are_tokens_of_answers_that_another_follows() -> None:
    batch = Rig(made("dflash")).batch
    anchors, real = chosen_anchors(batch, 100)
    found = [sorted(anchors[row][real[row]].tolist()) for row in range(3)]
    assert found == [list(range(n, length - 1)) for n, length in zip(ANSWERS, LENGTHS, strict=True)]
    few, kept = chosen_anchors(batch, 4)
    assert few.shape == (3, 4) and kept.sum(1).tolist() == [4, 2, 4]
    assert all(len(set(row.tolist())) == 4 for row in few)


def test_draws_depend_on_seed_epoch_and_batch_alone() -> None:
    data = answer_set([[1, 2]] * 5, [[3, 4, 5]] * 5, 64)

    def draws(first: int, seed: int = 1) -> list[Tensor]:
        batches = training_batches(data, 2, 8, seed, CPU, first)
        return [next(batches).draws for _ in range(6 - first)]

    whole = draws(0)
    assert all(torch.equal(a, b) for a, b in zip(whole[3:], draws(3), strict=True)), "as a resumed run has them"
    assert len({tuple(each.flatten().tolist()) for each in [*whole, *draws(0, seed=2)]}) == 12
    assert all(each.min() >= 0 and each.max() < 1 for each in whole)


SHORT: dict[str, Any] = {
    "batch_size": 16,
    "ttt_steps": 4,
    "learning_rate": 1e-2,
    "pad_multiple": 8,
    "held_out_every": 4,
    "checkpoint_every": 3,
    "log_every": 2,
}
SHAPE = {"num_layers": 1, "num_anchors": 8, "aux_layers": (1, 2, 3)}


class Killed(Exception):
    """Stands for a process that ends in the middle of a run."""


class Bench:
    """A tiny target that reads more than its last token, and its answers."""

    def __init__(self) -> None:
        self.target = tiny_llama(context=0.3)
        self.model = wrap(
            self.target, max_num_seqs=16, kv_cache_tokens=1000, max_num_batched_tokens=256, max_model_len=64
        )

    @functools.cached_property
    def answers(self) -> AnswerSet:
        """To 200 prompts."""
        prompts = random_prompts([4] * 200, seed=2)
        completions = self.model.generate(prompts, SamplingParams(max_new_tokens=20))
        return answer_set(prompts, [c.token_ids for c in completions], max_length=32)

    def plan(self, kind: str, shape: dict[str, Any], **settings: Any) -> run.TrainingPlan:
        config = TrainConfig(**{**SHORT, **settings})
        return run.plan_training(self.model, "block", {"kind": kind, **SHAPE, **shape}, config, held_out=20)

    def train(self, output: Path, kind: str, shape: dict[str, Any] | None = None, **settings: Any) -> TrainResult:
        plan = self.plan(kind, shape or {}, **settings)
        with locked(output):
            plan.claim(output, {})
            return plan.run(self.answers, output, Console(file=io.StringIO()))

    def tau(self, head: Any) -> float:
        """Acceptance length on prompts that were not trained on."""
        wrapped = wrap(self.target, head, num_speculative_tokens=4)
        completions = wrapped.generate(random_prompts([4] * 12, seed=77), SamplingParams(max_new_tokens=16))
        return pool_requests([c.stats for c in completions]).tau


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*drafts were accepted")
def test_the_head_learns_and_reads_its_context(bench: Bench, tmp_path: Path) -> None:
    """More drafts are accepted than of a fresh head, and than of the same one whose context has no states."""
    result = bench.train(tmp_path / "run", "dspark", steps=60, held_out_every=15, checkpoint_every=1000)
    first, last = result.history[0], result.history[-1]
    assert last.loss < first.loss - 0.05 and last.tau > 1.3
    fresh = bench.plan("dspark", {}).recipe
    blind = blind_of(wrap(bench.target, str(result.folder), num_speculative_tokens=4))
    learned = bench.tau(str(result.folder))
    assert learned > 1.15
    assert learned > bench.tau(fresh.finished(fresh.start(torch.ones))) + 0.1
    assert learned > bench.tau(blind) + 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("short_evaluations")
@pytest.mark.filterwarnings("ignore:.*drafts were accepted")
@pytest.mark.parametrize("calls", [4, pytest.param(9, marks=pytest.mark.thorough)])
def test_a_killed_run_goes_on_with_the_same_result(
    calls: int, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same anchors, too."""
    whole = bench.train(tmp_path / "whole", "dspark", steps=8)
    real = run.target_features

    def deadly(model: SpeculativeModel, aux_layers: tuple[int, ...]) -> Any:
        features, left = real(model, aux_layers), iter(range(calls))

        def counted(*batch: Tensor) -> Any:
            if next(left, None) is None:
                raise Killed
            return features(*batch)

        return counted

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run, "target_features", deadly)
        bench.train(tmp_path / "cut", "dspark", steps=8)
    resumed = bench.train(tmp_path / "cut", "dspark", steps=8)
    assert same(whole, resumed) and resumed.history == whole.history
    with pytest.raises(InvalidInputError, match="num_anchors: 8 -> 4"):
        bench.train(tmp_path / "cut", "dspark", {"num_anchors": 4}, steps=8)


@pytest.mark.usefixtures("short_evaluations")
@pytest.mark.filterwarnings("ignore:.*drafts were accepted")
def test_a_confidence_head_learns_what_is_accepted(bench: Bench, tmp_path: Path) -> None:
    """Held out, its mean of each draft comes near the probability of acceptance; its labels teach the rest nothing."""
    shape = {"confidence": True, "slots": "fill-in"}
    result = bench.train(tmp_path / "run", "dspark", shape, steps=40, held_out_every=10)
    gaps = [max(abs(c - p) for c, p in zip(*m.confidence[:2], strict=True)) for m in result.history]
    assert gaps[-1] < min(0.05, gaps[0]) and len(result.history[-1].confidence[0]) == 4
    assert set(load_file(result.folder / "model.safetensors")) >= {f"{CONFIDENCE}.weight", f"{CONFIDENCE}.bias"}
    config = json.loads((result.folder / "config.json").read_text())
    assert config["enable_confidence_head"] and config["confidence_head_with_markov"]
    with wrap(bench.target, str(result.folder), num_speculative_tokens=4) as loaded:
        found: Any = loaded.head
        assert found.spec.confidence == "outputs and tokens"
        temperatures = result.history[-1].confidence[3]
        assert found.spec.confidence_temperatures == (1.0, *temperatures) and set(temperatures) != {1.0}


def test_temperatures_are_those_of_the_labels() -> None:
    """Planted 2, 1, 0.5 and 2.9, of drafts that not all blocks reach; the mean confidence becomes the labels'."""
    planted = torch.tensor([2.0, 1.0, 0.5, 2.9])
    generator = torch.Generator().manual_seed(1)
    odds = 3 * torch.randn(4000, 4, generator=generator) + 3
    share = (odds / planted).sigmoid()
    rated = torch.stack((odds, share)).where(
        torch.rand(4000, 4, generator=generator) < torch.linspace(1, 0.2, 4), math.nan
    )
    before, wanted, after, found = (torch.tensor(row) for row in calibration(rated))
    assert found[:3].tolist() == pytest.approx([2.0, 1.0, 0.5]) and float(found[3]) == pytest.approx(2.9, rel=0.018)
    torch.testing.assert_close(after, wanted, rtol=0.01, atol=0)
    assert (before - wanted).abs()[[0, 2, 3]].min() > 0.02 and float(before[1]) == pytest.approx(float(wanted[1]))
    drawn = torch.stack((odds, (torch.rand(4000, 4, generator=generator) < share).float()))
    assert calibration(drawn)[3] == pytest.approx(planted.tolist(), rel=0.15), "with accepted or not as labels, too"


def test_a_draft_that_no_block_has_keeps_its_temperature() -> None:
    """As where all held-out answers are shorter than a block."""
    odds = torch.linspace(-2, 3, 50)[:, None].expand(50, 3)
    rated = torch.stack((odds, (odds / 2).sigmoid())).where(torch.tensor([True, True, False]), math.nan)
    before, wanted, after, found = calibration(rated)
    assert found == pytest.approx((2.0, 2.0, 1.0)) and (before[2], wanted[2], after[2]) == (0.0, 0.0, 0.0)


def test_a_measurement_shows_confidence_before_and_after() -> None:
    console = Console(file=io.StringIO(), width=300)
    display = TrainingDisplay(console, 8, 8)
    display.measurement(
        Measurement(8, 1.0, (0.5, 0.25), confidence=((0.9, 0.8), (0.7, 0.6), (0.72, 0.61), (2, 1.5))), None
    )
    line = console.file.getvalue()  # type: ignore[attr-defined]
    assert "confidence 0.90 0.80, accepted 0.70 0.60, calibrated 0.72 0.61, temperatures 2.00 1.50" in line


def test_labels_of_the_confidence_head_are_constants() -> None:
    """Without the other losses and with outputs that do not reach it, no weight of the head but its own learns."""
    rig = Rig(made("confidence"))
    rig.head.requires_grad_(True)
    rig.head.confidence_head["proj"].weight.data.zero_()
    more = {"num_anchors": 8, "weights": LossWeights(0.0, 0.0, 1.0)}
    evaluate_blocks(rig.head, rig.batch, rig.aux, rig.logits, rig.steps, DECAY, **more).loss.backward()
    moved = [name for name, p in rig.head.named_parameters() if p.grad is not None and p.grad.any()]
    assert moved == [f"{CONFIDENCE}.weight", f"{CONFIDENCE}.bias"]


def same(a: TrainResult, b: TrainResult) -> bool:
    left, right = (load_file(each.folder / "model.safetensors") for each in (a, b))
    return left.keys() == right.keys() and all(torch.equal(t, right[name]) for name, t in left.items())


@pytest.mark.slow
@pytest.mark.usefixtures("short_evaluations")
@pytest.mark.filterwarnings("ignore:.*drafts were accepted")
@pytest.mark.parametrize(
    ("kind", "slots", "written"),
    [
        ("dflash", None, "DFlashDraftModel"),
        ("dspark", None, "Qwen3DSparkModel"),
        ("dflash", "anchor-first", "Qwen3DSparkModel"),
        ("dspark", "fill-in", "Qwen3DSparkModel"),
    ],
)
@pytest.mark.cases(2)
def test_a_saved_head_is_the_trained_one(
    kind: str, slots: str | None, written: str, bench: Bench, tmp_path: Path
) -> None:
    plan = bench.plan(kind, {"slots": slots})
    head = plan.recipe.start(torch.ones)
    folder = plan.recipe.save(head, tmp_path / "head")
    assert json.loads((folder / "config.json").read_text())["architectures"] == [written]
    with wrap(bench.target, str(folder), num_speculative_tokens=4) as loaded:
        found: Any = loaded.head
        spec: BlockSpec = found.spec
        own = written == "Qwen3DSparkModel"
        assert (spec.own_embed, spec.own_lm_head, spec.first_slot) == (own, own, int(head.spec.slots == "fill-in"))
        assert {name: getattr(spec, name) for name in ("slots", "markov", "markov_rank", "block_size", "rope")} == {
            name: getattr(head.spec, name) for name in ("slots", "markov", "markov_rank", "block_size", "rope")
        }
        assert (spec.aux_layers, spec.mask_token_id, spec.block_size - spec.first_slot) == ((1, 2, 3), VOCAB - 1, 4)
    rig = Rig(head.eval())
    for anchor in range(6, 14):
        args = rig.batch.token_ids[0, : anchor + 1], rig.aux[0, :anchor], 4
        assert oracle_drafts(found, *args) == oracle_drafts(head, *args)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("dflash", {"markov_rank": 4}, "markov_rank=4: a dflash head has no Markov head"),
        ("dflash", {"confidence": True}, "confidence=True: a dflash head has no confidence head"),
        ("dspark", {"mask_token_id": VOCAB}, f"mask_token_id={VOCAB}: allowed are the embedding's rows"),
        ("dspark", {"aux_layers": (1, 9)}, "aux layers 0 … 3 can be read"),
        ("dspark", {"num_layers": 0}, "num_layers of a block-parallel head must be"),
    ],
)
def test_heads_that_cannot_be_are_refused_at_once(kind: str, shape: dict[str, Any], message: str, bench: Bench) -> None:
    with pytest.raises(InvalidInputError, match=message):
        bench.plan(kind, shape)


QUESTION = "Anna has {} apples and buys 8 more. How many has she now?"


@pytest.mark.usefixtures("short_evaluations")
@pytest.mark.filterwarnings("ignore:.*drafts were accepted")
@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_trains_a_head_for_the_built_in_target(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"question": QUESTION.format(n)}) for n in range(6)), "utf-8")
    options = "--steps 2 --batch-size 2 --held-out 2 --max-new-tokens 12 -k 3 --device cpu --max-num-seqs 6"
    arguments = ["block", "--kind", "dflash", "--data", str(questions), "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(train, [*arguments, *options.split()], catch_exceptions=False)
    assert result.exit_code == 0 and "the head is in" in result.output
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["decay"]["value"] == pytest.approx(math.exp(-1 / 4)) and settings["block_size"]["value"] == 4
    model = SpeculativeModel.from_pretrained("gsm-llama", tmp_path / "run" / "head", max_model_len=128)
    assert model.num_speculative_tokens == 3
    assert model.generate("Anna has 3 apples.", SamplingParams(max_new_tokens=4))[0].token_ids


def asked(split: str, count: int) -> list[list[dict[str, str]]]:
    """Chats with generated questions."""
    return [[{"role": "user", "content": problem.question}] for problem in problems(split, count, seed=0)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*drafts were accepted")
def test_a_minute_on_a_cpu_gives_the_built_in_target_a_head(tmp_path: Path) -> None:
    """From a few generated questions: it drafts better than a fresh head, and than without its context."""
    model = SpeculativeModel.from_pretrained("gsm-llama", max_num_seqs=32, max_model_len=256, device="cpu")
    limits = AnswerLimits(48, 256)
    questions = prepare_questions(model, asked("train", 192), limits)
    settings = TrainConfig(**{**SHORT, "batch_size": 8, "ttt_steps": 7, "learning_rate": 2e-3, "steps": 60})
    settings = replace(settings, held_out_every=30, checkpoint_every=1000)
    plan = run.plan_training(model, "block", {"kind": "dspark", "num_layers": 2, "num_anchors": 32}, settings, 16)
    console = Console(file=io.StringIO())
    with locked(tmp_path):
        plan.claim(tmp_path, {})
        result = plan.run(answer_prepared(model, questions, tmp_path, console), tmp_path, console, 48)
    first, last = result.history
    assert last.loss < first.loss and last.tau > first.tau
    prompts = asked("heldout", 16)

    def drafted(head: Any) -> SpeculativeModel:
        return SpeculativeModel.from_pretrained(model.hf_model, head, tokenizer=model.tokenizer)

    def tau(head: Any) -> float:
        with drafted(head) as wrapped:
            completions = wrapped.generate(prompts, SamplingParams(max_new_tokens=48))
        return pool_requests([c.stats for c in completions]).tau

    learned, fresh = tau(result.folder), tau(plan.recipe.finished(plan.recipe.start(torch.ones)))
    assert learned > max(fresh, tau(blind_of(drafted(result.folder)))) + 0.1


def blind_of(model: SpeculativeModel) -> Any:
    """A model's head with zeros for its context's states."""
    head: Any = copy.deepcopy(model.head)
    head.fc.weight.zero_()
    return head
