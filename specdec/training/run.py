"""Train a head for a loaded target: a run's plan, checked before it starts, and the features that the target gives."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic

import torch
from rich.console import Console

from drafters.base import FINAL_NORM, Head
from drafters.eagle3.checkpoint import fresh_eagle3, save_eagle3
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec, default_aux_layers
from drafters.mtp.checkpoint import deepseek_tensors, load_mtp, save_mtp
from drafters.mtp.convention import MtpConvention
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import mtp_target
from drafters.rope import RopeSpec
from drafters.training.data import AnswerSet
from drafters.training.objective import Features
from drafters.training.state import FREE_SETTINGS, Save, TrainedHead
from drafters.training.train_config import TrainConfig
from drafters.training.trainer import TrainingData, TrainResult, train
from specdec.errors import HeadLoadError, InvalidInputError
from specdec.interrupts import interrupts_as_they_are
from specdec.loading.builtin import resolve
from specdec.loading.heads import target_facts
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests
from specdec.selftest.selftest import self_test_head
from specdec.training.run_folder import Questions, Setting, claim, locked, release
from specdec.wrapped.fingerprint import target_fingerprint, weights_fingerprint
from specdec.wrapped.probing import decoder_of, last_states, probe_target

_EVALUATED_PROMPTS = 64
_EVALUATED_TOKENS = 512


@dataclass(frozen=True)
class TrainingPlan(Generic[TrainedHead]):
    """A checked run, which can begin once there are answers; model: the target, without a head.

    Attributes:
        held_out: answers that only measure. settings: what decides the result, besides the answers.
        start: the answers to learn from -> the head to train. features: the target's states and logits of a batch.
        finished: the trained head as an engine loads it. save: writes a head in the layout of its family.
    """

    model: SpeculativeModel
    config: TrainConfig
    held_out: int
    settings: Mapping[str, Setting]
    start: Callable[[AnswerSet], TrainedHead]
    features: Features
    finished: Callable[[TrainedHead], Head]
    save: Save[TrainedHead]

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
                f"ttt_steps={self.config.ttt_steps} needs answers of {self.config.ttt_steps + 1} tokens (a bonus token "
                f"and as many drafts); by max_new_tokens and max_length, the longest can have {max(room)}"
            )

    def claim(self, output: Path, data: Mapping[str, Setting], *, overwrite: bool = False) -> None:
        """Make `output` the folder of this run on answers from `data`, or find that it is already.

        overwrite: remove checkpoints and head of whatever run is there, this one included; answers stay.

        Raises:
            InvalidInputError, RunFolderError: see `specdec.training.run_folder.claim`.
        """
        if overwrite:
            for folder in _results(output):
                shutil.rmtree(folder)
            release(output)
        claim(output, {**self.settings, **data}, _results(output))

    @interrupts_as_they_are()
    def run(self, answers: AnswerSet, output: Path, console: Console) -> TrainResult:
        """Train; goes on from the newest checkpoint in `output`.

        Raises:
            InvalidInputError: too few answers, or none long enough.
            RunFolderError: another process trains there, or something there is damaged or cannot be written.
            TrainingDivergedError: the loss or a weight is not finite.
        """
        training, measured = answers.split(self.held_out, self.config.seed)
        longest = int((training.lengths - training.answer_starts).max())
        if longest <= self.config.ttt_steps:
            raise InvalidInputError(
                f"the longest answer has {longest} tokens; ttt_steps={self.config.ttt_steps} needs one of "
                f"{self.config.ttt_steps + 1}"
            )
        data = TrainingData(training, measured)
        evaluate = _evaluation(self.model, measured, self.config.ttt_steps, self.finished)
        with locked(output):
            head = self.start(training)
            return train(self.config, head, data, self.features, evaluate, output, console, save=self.save)


def common_settings(model: SpeculativeModel, family: str, config: TrainConfig, held_out: int) -> dict[str, Setting]:
    """What decides the result for every family of heads."""
    described = model.describe()
    values = {
        "head": Setting(family),
        "target": Setting(target_fingerprint(model.hf_model), str(described["target"])),
        "dtype": Setting(str(model.dtype).removeprefix("torch.")),
        "device": Setting(model.device.type),
        "backend": Setting(model.backend_name),
        "held_out": Setting(held_out),
    }
    return values | {name: Setting(value) for name, value in asdict(config).items() if name not in FREE_SETTINGS}


def _results(output: Path) -> list[Path]:
    """Checkpoints, whole, damaged or half-written, and the head of earlier runs."""
    return sorted(path for pattern in ("step-*", "head", "head.*") for path in output.glob(pattern) if path.is_dir())


def _evaluation(
    model: SpeculativeModel, measured: AnswerSet, num_drafts: int, finished: Callable[[TrainedHead], Head]
) -> Callable[[TrainedHead], Mapping[str, float]]:
    """Acceptance of the finished head in a real engine on held-out prompts; `finished` makes it ready for that."""
    count = min(len(measured), _EVALUATED_PROMPTS)
    prompts = [measured.sequence(i)[: measured.answer_starts[i]].tolist() for i in range(count)]

    def evaluate(head: TrainedHead) -> Mapping[str, float]:
        trial = SpeculativeModel.from_pretrained(
            model.hf_model,
            draft=finished(head),
            num_speculative_tokens=num_drafts,
            tokenizer=model.tokenizer,
            max_model_len=model.config.max_model_len,
            backend=model.backend_name,
            generation_config=model.generation_config_use,
            cuda_graphs=False,
        )
        completions = trial.generate(prompts, SamplingParams(max_new_tokens=_EVALUATED_TOKENS))
        return {"tau": pool_requests([c.stats for c in completions]).tau}

    return evaluate


@dataclass(frozen=True)
class HeadShape:
    """What is free to choose about a new EAGLE-3 head; the rest follows from its target, as does what is None here.

    Attributes:
        draft_vocab_size: Vd, None for the target's whole vocabulary.
        intermediate_size: of the MLP, None for the target's own.
        aux_layers: None for the usual (2, N//2, N-3).
    """

    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    aux_layers: tuple[int, ...] | None = None


def eagle3_spec(model: SpeculativeModel, shape: HeadShape) -> Eagle3Spec:
    """The spec of a new head for a target: heads, head dim, rope base and eps as the target has them.

    A target without attention (Mamba) gives none of these: the head has heads of up to 128 and an MLP of four times its
    width then, and positions up to the model's longest sequence.
    """
    config = model.hf_model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    hidden = config.hidden_size
    heads, kv_heads, head_dim = _attention_shape(config)
    longest = getattr(config, "max_position_embeddings", None) or model.config.max_model_len
    return Eagle3Spec(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=shape.intermediate_size or getattr(config, "intermediate_size", None) or 4 * hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=model.target.vocab_size,
        draft_vocab_size=shape.draft_vocab_size or model.target.vocab_size,
        aux_layers=shape.aux_layers or default_aux_layers(config.num_hidden_layers),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope=RopeSpec(theta=float(rope.get("rope_theta", 10000.0)), max_positions=longest),
    )


def _attention_shape(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of a new head; a Mamba's head_dim is that of its states."""
    heads: int | None = getattr(config, "num_attention_heads", None)
    if heads is None:
        head_dim = gcd(config.hidden_size, 128)
        return config.hidden_size // head_dim, config.hidden_size // head_dim, head_dim
    return (
        heads,
        getattr(config, "num_key_value_heads", heads),
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def plan_eagle3(
    model: SpeculativeModel, shape: HeadShape, config: TrainConfig, held_out: int
) -> TrainingPlan[Eagle3Head]:
    """Check everything about a new EAGLE-3 head that can be known before there are answers.

    Raises:
        InvalidInputError: the model has a head already, or cannot have one of this shape.
        HeadLoadError: the target has no output embedding.
    """
    _check_alone(model)
    spec = eagle3_spec(model, shape)
    facts = target_facts(probe_target(model.hf_model))
    features = target_features(model, spec.aux_layers)
    settings = common_settings(model, "eagle3", config, held_out)
    for name in ("draft_vocab_size", "intermediate_size"):
        settings[name] = Setting(getattr(spec, name))
    settings["aux_layers"] = Setting(spec.aux_layers)

    def start(training: AnswerSet) -> Eagle3Head:
        return fresh_eagle3(spec, facts, training.token_counts(spec.vocab_size), config.seed)

    def finished(head: Eagle3Head) -> Head:
        return copy.deepcopy(head).to(model.dtype).eval()

    return TrainingPlan(model, config, held_out, settings, start, features, finished, save_eagle3)


def plan_mtp(
    model: SpeculativeModel, module: str | Path, convention: MtpConvention, config: TrainConfig, held_out: int
) -> TrainingPlan[MtpHead]:
    """Load a multi-token-prediction module and check that it can be trained on its own outputs and saved.

    Released modules were trained for one draft; reused for more, they read their own states, which they never saw.

    Raises:
        InvalidInputError: the model has a head already.
        HeadLoadError: see `drafters.mtp.checkpoint.load_mtp`; more than one module, or one that cannot be saved.
    """
    _check_alone(model)
    target = mtp_target(model.hf_model)
    modules = load_mtp(resolve(module), target, torch.float32, model.device, convention)
    if len(modules) > 1:
        raise HeadLoadError(f"{module} has {len(modules)} multi-token-prediction modules; one can be trained")
    head = modules[0]
    deepseek_tensors(head, target.num_layers)  # raises before anything is trained
    self_test_head(head, model.hf_model, model.tokenizer, config.ttt_steps)
    settings = common_settings(model, "mtp", config, held_out)
    settings["module"] = Setting(weights_fingerprint(head), str(module))
    settings["mtp_concat"], settings["mtp_feedback"] = Setting(convention.concat), Setting(convention.feedback)

    def finished(trained: MtpHead) -> Head:
        with TemporaryDirectory() as folder:
            own = MtpConvention(feedback=convention.feedback)
            return load_mtp(save_mtp(trained, folder, target), target, model.dtype, model.device, own)[0]

    save, features = partial(save_mtp, target=target), final_features(model)
    return TrainingPlan(model, config, held_out, settings, lambda training: head, features, finished, save)


def _check_alone(model: SpeculativeModel) -> None:
    if model.group.size > 1:
        raise InvalidInputError(
            f"training needs the whole target in one process; load it without tensor_parallel_size={model.group.size}"
        )
    if model.head is not None:
        raise InvalidInputError("the target was loaded with a head; load it with draft=None to train one")


def final_features(model: SpeculativeModel) -> Features:
    """The target's states after its final norm and its logits, of right-padded batches."""
    decoder, width = decoder_of(model.hf_model), model.hf_model.config.get_text_config().hidden_size

    @torch.no_grad()
    def features(token_ids: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        caught: list[torch.Tensor] = []
        hook = decoder.register_forward_hook(
            lambda module, _, output: caught.append(last_states(module, output, width))
        )
        try:
            logits = model.hf_model(input_ids=token_ids, use_cache=False).logits
        finally:
            hook.remove()
        return caught[0].float(), logits.float()

    return features


def target_features(model: SpeculativeModel, aux_layers: tuple[int, ...]) -> Features:
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
    def features(token_ids: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.hf_model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[layer] for layer in aux_layers], -1).float(), out.logits.float()

    return features
