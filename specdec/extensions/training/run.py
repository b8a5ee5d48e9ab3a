"""Train a head for a loaded target: a run's plan, checked before it starts, and the features that the target gives."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from attention.backends.limits import dtype_name
from drafters.base import FINAL_NORM, Head, Layers, Recipe
from drafters.families import FAMILIES
from drafters.training.data import AnswerSet
from drafters.training.objective import Features
from drafters.training.state import FREE_SETTINGS, TrainConfig
from drafters.training.trainer import Evaluate, Speedup, TrainingData, TrainResult, train
from specdec.errors import InvalidInputError, SpecdecWarning
from specdec.extensions.training.run_folder import Questions, Setting, claim, locked, release
from specdec.interrupts import interrupts_as_they_are
from specdec.loading.heads import target_facts
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests, speedup
from specdec.selftest.selftest import self_test_head
from specdec.values import Fields, ratio
from specdec.wrapped.fingerprint import target_fingerprint, weights_fingerprint
from specdec.wrapped.probing import decoder_of, last_states, probe_target

_EVALUATED_PROMPTS = 64
_EVALUATED_TOKENS = 512
_TIMED_TOKENS = 32
_TIMED_RUNS = 5
_SHOWN_LENGTHS = (2, 2.5, 3)
"""Acceptance lengths whose speed-up is shown before training."""


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds of a round of one request on this machine: of the target alone, and with `num_drafts` drafts of a head.

    >>> print(RoundSeconds(0.010, 0.014, 5))
    a round of one request takes 10.0 ms, with 5 drafts 14.0 ms: a head that accepts 0.40 of 5 drafts breaks even; \
predicted speed-up by acceptance length: 2: 1.43 ×, 2.5: 1.79 ×, 3: 2.14 ×
    """

    plain: float
    drafted: float
    num_drafts: int

    def speedup(self, tokens: float) -> float:
        """The predicted speed-up at an acceptance length of so many tokens."""
        return speedup(tokens, self.plain, self.drafted)

    def __str__(self) -> str:
        drafts = self.num_drafts
        needed = max(self.drafted / self.plain - 1, 0.0)
        which = f"a head that accepts {needed:.2f} of {drafts} drafts" if needed <= drafts else "no head"
        lengths = [f"{n}: {self.speedup(n):.2f} ×" for n in _SHOWN_LENGTHS if n <= drafts + 1]
        times = f"{1e3 * self.plain:.1f} ms, with {drafts} drafts {1e3 * self.drafted:.1f} ms"
        return (
            f"a round of one request takes {times}: {which} breaks even; predicted speed-up by acceptance "
            f"length: {', '.join(lengths)}"
        )


@dataclass(frozen=True)
class TrainingPlan:
    """A checked run, which can begin once there are answers; model: the target, without a head.

    Attributes:
        held_out: answers that only measure. settings: what decides the result, besides the answers.
        recipe: of the head. features: the target's states and logits of a batch.
    """

    model: SpeculativeModel
    config: TrainConfig
    held_out: int
    settings: Mapping[str, Setting]
    recipe: Recipe[Any]
    features: Features

    def check_questions(self, questions: Sequence[Questions]) -> None:
        """Raises InvalidInputError when too few questions can be used, or none for as many drafts as are trained."""
        room = [each.room[i] for each in questions for i in each.usable]
        if not 0 < self.held_out < len(room):
            raise InvalidInputError(
                f"of {len(room)} usable questions, 1 to {len(room) - 1} can be held out, not held_out={self.held_out}; "
                "give more questions or hold out fewer"
            )
        if max(room) <= self.config.ttt_steps:
            raise InvalidInputError(
                f"{self.config.ttt_steps} drafts in a row (ttt_steps) need answers of {self.config.ttt_steps + 1} "
                f"tokens (a bonus token and the drafts); by max_new_tokens and max_length, the longest can have "
                f"{max(room)}"
            )

    def round_seconds(self, questions: Sequence[Questions]) -> RoundSeconds:
        """Time rounds on the shortest question, with a head of this shape that has learned nothing yet.

        Raises:
            CacheTooSmallError, OutOfDeviceMemoryError: there is no room for it beside the plan's model.
        """
        prompt = min((each.prompts[i] for each in questions for i in each.usable), key=len)  # it has the most room
        head = self.recipe.finished(self.recipe.start(partial(torch.ones, dtype=torch.int64)))
        return time_rounds(self.model, head, self.config.ttt_steps, prompt)

    def claim(self, output: Path, data: Mapping[str, Setting], *, overwrite: bool = False) -> None:
        """Make `output` the folder of this run on answers from `data`, or find that it is already.

        overwrite: remove checkpoints and head of whatever run is there, this one included; answers stay.

        Raises:
            InvalidInputError, RunFolderError: see `specdec.extensions.training.run_folder.claim`.
        """
        if overwrite:
            for folder in _results(output):
                shutil.rmtree(folder)
            release(output)
        claim(output, {**self.settings, **data}, _results(output))

    @interrupts_as_they_are()
    def run(
        self,
        answers: AnswerSet,
        output: Path,
        console: Console,
        max_new_tokens: int = 512,
        speedup: Speedup | None = None,
    ) -> TrainResult:
        """Train; goes on from the newest checkpoint in `output`. The plan's model may be closed.

        max_new_tokens: of answers that measure the head, which have 512 at most. speedup: see `train`.

        Raises:
            InvalidInputError: too few answers, or none long enough.
            RunFolderError: another process trains there, or something there is damaged or cannot be written.
            TrainingDivergedError: the loss or a weight is not finite.
        """
        training, measured = answers.split(self.held_out, self.config.seed)
        longest = int((training.lengths - training.answer_starts).max())
        if longest <= self.config.ttt_steps:
            raise InvalidInputError(
                f"the longest answer has {longest} tokens; {self.config.ttt_steps} drafts in a row (ttt_steps) need "
                f"one of {self.config.ttt_steps + 1}"
            )
        data = TrainingData(training, measured)
        ready = self.recipe.finished
        evaluate = evaluation(self.model, measured, self.config.ttt_steps, ready, max_new_tokens, speedup)
        with locked(output):
            head = self.recipe.start(training.token_counts)
            return train(
                self.config,
                head,
                data,
                self.features,
                evaluate,
                output,
                console,
                save=self.recipe.save,
                objective=self.recipe.objective,
                speedup=speedup,
            )


def _results(output: Path) -> list[Path]:
    """Checkpoints, whole, damaged or half-written, and the head of earlier runs."""
    return sorted(path for pattern in ("step-*", "head", "head.*") for path in output.glob(pattern) if path.is_dir())


def evaluation(
    model: SpeculativeModel,
    measured: AnswerSet,
    num_drafts: int,
    finished: Callable[[Any], Head],
    max_new_tokens: int,
    speedup: Speedup | None = None,
) -> Evaluate:
    """Acceptance of the finished head in a real engine on held-out prompts; `finished` makes it ready for that."""
    count = min(len(measured), _EVALUATED_PROMPTS)
    prompts = [measured.sequence(i)[: measured.answer_starts[i]].tolist() for i in range(count)]

    def evaluate(head: Any) -> Mapping[str, float]:
        sizes = {"max_model_len": model.config.max_model_len, "cuda_graphs": False}
        with _with_head(model, finished(head), num_drafts, sizes) as trial:
            completions = trial.generate(prompts, SamplingParams(max_new_tokens=min(max_new_tokens, _EVALUATED_TOKENS)))
        tau = pool_requests([c.stats for c in completions]).tau
        return {"tau": tau} | ({} if speedup is None else {"predicted speed-up": speedup(tau)})

    return evaluate


def _with_head(model: SpeculativeModel, head: Head, num_drafts: int, sizes: Fields) -> SpeculativeModel:
    """The target of a model, which may be closed, with a head and otherwise as it was loaded."""
    return SpeculativeModel.from_pretrained(
        model.hf_model,
        draft=head,
        num_speculative_tokens=num_drafts,
        tokenizer=model.tokenizer,
        backend=model.backend_name,
        generation_config=model.generation_config_use,
        cpu_linears="plain" if model.plain_linears else "packed",
        **sizes,
    )


def time_rounds(model: SpeculativeModel, head: Head, num_drafts: int, prompt: Sequence[int]) -> RoundSeconds:
    """Medians of a few short runs, with and without drafts in turn; the first run of each is for warming up.

    Raises:
        CacheTooSmallError, OutOfDeviceMemoryError: there is no room for it.
    """
    longest = min(model.config.max_model_len, len(prompt) + _TIMED_TOKENS + num_drafts + 1)
    sizes = {"max_model_len": longest, "max_num_seqs": 1, "kv_cache_tokens": 4 * longest}  # the self-test has 3 rows
    with _with_head(model, head, num_drafts, sizes) as trial:

        def seconds(drafts: int) -> float:
            params = SamplingParams(
                max_new_tokens=_TIMED_TOKENS, ignore_eos=True, num_speculative_tokens=drafts, cache_prefix=False
            )
            stats = trial.generate([prompt], params)[0].stats
            return ratio(stats.decode_s, len(stats.rounds))

        with warnings.catch_warnings(action="ignore", category=SpecdecWarning):  # that its drafts are not accepted
            pairs = [(seconds(0), seconds(num_drafts)) for _ in range(1 + _TIMED_RUNS)]
    plain, drafted = (median(times[1:]) for times in zip(*pairs, strict=True))
    return RoundSeconds(plain, drafted, num_drafts)


def plan_training(
    model: SpeculativeModel, family: str, options: Fields, config: TrainConfig, held_out: int
) -> TrainingPlan:
    """Check everything about training a head that can be known before there are answers.

    Args:
        family: one of `drafters.families.FAMILIES`. options: see the `recipe` of its code.

    Raises:
        InvalidInputError: the model has a head already, or cannot have one of this shape.
        HeadLoadError: the target has no output embedding, or the head to go on from cannot be read or saved.
    """
    if model.group.size > 1:
        raise InvalidInputError(
            f"training needs the whole target in one process; load it without tensor_parallel_size={model.group.size}"
        )
    if model.head is not None:
        raise InvalidInputError("the target was loaded with a head; load it with draft=None to train one")
    hf_model = model.hf_model
    recipe = (
        FAMILIES[family]
        .code()
        .recipe(
            hf_model,
            lambda: target_facts(probe_target(hf_model)),
            model.config.max_model_len,
            config.seed,
            {**options, "num_drafts": config.ttt_steps},
        )
    )
    described = model.describe()
    settings = {
        "head": Setting(family),
        "target": Setting(target_fingerprint(model.hf_model), str(described["target"])),
        "dtype": Setting(dtype_name(model.dtype)),
        "device": Setting(model.device.type),
        "backend": Setting(model.backend_name),
        "held_out": Setting(held_out),
    }
    settings |= {name: Setting(value) for name, value in asdict(config).items() if name not in FREE_SETTINGS}
    if recipe.initial is not None:
        self_test_head(recipe.initial, hf_model, model.tokenizer, config.ttt_steps)
        settings["module"] = Setting(weights_fingerprint(recipe.initial), str(options["module"]))
    settings |= {name: Setting(value) for name, value in recipe.settings.items()}
    last = recipe.aux_layers == (FINAL_NORM,)
    features = final_features(model) if last else target_features(model, recipe.aux_layers)
    return TrainingPlan(model, config, held_out, settings, recipe, features)


def final_features(model: SpeculativeModel) -> Features:
    """The target's states after its final norm and its logits, of right-padded batches."""
    decoder = decoder_of(model.hf_model)
    width = model.hf_model.config.get_text_config().hidden_size

    @torch.no_grad()
    def features(token_ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        caught = []
        hook = decoder.register_forward_hook(
            lambda module, _, output: caught.append(last_states(module, output, width))
        )
        try:
            logits = model.hf_model(input_ids=token_ids, use_cache=False).logits
        finally:
            hook.remove()
        return caught[0].float(), logits.float()

    return features


def target_features(model: SpeculativeModel, aux_layers: Layers) -> Features:
    """The target's aux hidden states and logits of right-padded batches, through transformers' own forward.

    The tuple form of `output_hidden_states` is used: index b is aux layer b below N in every release. The causal mask
    alone keeps padding on the right out of the real tokens.

    Raises:
        InvalidInputError: an aux layer is not one of 0 … N-1.
    """
    num_layers = int(model.hf_model.config.get_text_config().num_hidden_layers)  # recurrent ones, too
    if FINAL_NORM in aux_layers or max(aux_layers) >= num_layers:
        raise InvalidInputError(f"aux layers {aux_layers}: to train, aux layers 0 … {num_layers - 1} can be read")

    @torch.no_grad()
    def features(token_ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        out = model.hf_model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[layer] for layer in aux_layers], -1).float(), out.logits.float()

    return features
