"""Training a head for a loaded target: the target's side of `drafters.training`, which itself needs no engine."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from drafters.base import FINAL_NORM, Head
from drafters.eagle3.checkpoint import save_eagle3
from drafters.eagle3.spec import Eagle3Spec, default_taps
from drafters.mtp.checkpoint import deepseek_tensors, load_mtp, save_mtp
from drafters.mtp.head import MtpHead
from drafters.mtp.spec import MtpReading, mtp_target
from drafters.rope import RopeSpec
from drafters.training.answers import AnswerSet, answer
from drafters.training.config import TrainConfig
from drafters.training.fresh import fresh_eagle3
from drafters.training.objective import Features
from drafters.training.state import TrainedHead
from drafters.training.trainer import TrainingData, TrainResult, train
from specdec.errors import HeadLoadError, InvalidInputError
from specdec.loading.targets import resolve, target_facts
from specdec.model import SpeculativeModel
from specdec.requests.prompts import encode_prompts
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests
from specdec.target.selftest import self_test_head
from specdec.target.target import probe_target

_JUDGED_PROMPTS = 64


@dataclass(frozen=True)
class HeadShape:
    """What is free to choose about a new EAGLE-3 head; the rest follows from its target.

    Attributes:
        draft_vocab_size: Vd, None for the target's whole vocabulary.
        intermediate_size: of the MLP, None for the target's own.
        taps: boundaries, None for the usual (2, N//2, N-3).
    """

    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    taps: tuple[int, ...] | None = None


def eagle3_spec(model: SpeculativeModel, shape: HeadShape) -> Eagle3Spec:
    """The spec of a new head for a target: heads, head dim, rope base and eps as the target has them."""
    config = model.hf_model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    return Eagle3Spec(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=shape.intermediate_size or config.intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=model.target.vocab_size,
        draft_vocab_size=shape.draft_vocab_size or model.target.vocab_size,
        taps=shape.taps or default_taps(config.num_hidden_layers),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope=RopeSpec(theta=float(rope.get("rope_theta", 10000.0)), max_positions=config.max_position_embeddings),
    )


@dataclass(frozen=True)
class AnswerLimits:
    """max_new_tokens of an answer, max_length of a training sequence."""

    max_new_tokens: int = 512
    max_length: int = 1024


def answer_questions(
    model: SpeculativeModel, questions: list[Any], limits: AnswerLimits, output: Path, console: Console
) -> AnswerSet:
    """The target's own answers, kept in `output`; an earlier run's file for the same questions is taken as it is.

    Args:
        questions: prompts as `SpeculativeModel.generate` takes them.
    """
    output.mkdir(parents=True, exist_ok=True)
    prompts = encode_prompts(questions, model.tokenizer)
    key = repr((model.describe()["target"], limits, prompts)).encode()
    path = output / f"answers-{hashlib.sha256(key).hexdigest()[:12]}.safetensors"
    if path.exists():
        return AnswerSet.load(path)
    params = SamplingParams(max_new_tokens=limits.max_new_tokens)

    def regenerate(batch: list[list[int]]) -> list[list[int]]:
        each = model.generate_iter(batch, params)
        shown = track(each, "the target answers", total=len(batch), console=console)
        done = {index: completion.token_ids for index, completion in shown}
        return [done[i] for i in range(len(batch))]

    answers = answer(prompts, regenerate, limits.max_length)
    answers.save(path)
    return answers


def train_eagle3(
    model: SpeculativeModel,
    answers: AnswerSet,
    shape: HeadShape,
    config: TrainConfig,
    output: Path,
    *,
    held_out: int = 256,
    console: Console,
) -> TrainResult:
    """Train a head on the target's answers; goes on from the newest checkpoint in `output`, so a killed run resumes.

    Args:
        model: the target, loaded without a head.
        answers: what `answer_questions` gave.
        output: gets checkpoints, and the finished head in `head/`.
        held_out: answers that only measure.

    Raises:
        InvalidInputError: the model has a head already, or there are too few questions.
        TrainingDivergedError: the loss is not finite.
    """
    _check_alone(model)
    training, measured = answers.split(held_out, config.seed)
    spec = eagle3_spec(model, shape)
    facts = target_facts(probe_target(model.hf_model))
    head = fresh_eagle3(spec, facts, training.token_counts(spec.vocab_size), config.seed)
    features = target_features(model, spec.taps)
    data = TrainingData(training, measured)
    judge = _judge(model, measured, config.ttt_steps, lambda head: copy.deepcopy(head).to(model.dtype).eval())
    return train(config, head, data, features, judge, output, console, save=save_eagle3)


def train_mtp(
    model: SpeculativeModel,
    module: str | Path,
    answers: AnswerSet,
    reading: MtpReading,
    config: TrainConfig,
    output: Path,
    *,
    held_out: int = 256,
    console: Console,
) -> TrainResult:
    """Go on training a multi-token-prediction module on its own outputs, as `train_eagle3` trains a head.

    Released modules were trained for one draft; reused for more, they read their own states, which they never saw.

    Args:
        model: the target, loaded without a head.
        module: folder or name of the checkpoint that holds the module, usually the target's own.
        reading: how to read it.
        output: gets checkpoints, and in `head/` the finished module as a DeepSeek-style checkpoint of its own.

    Raises:
        InvalidInputError: the model has a head already, or there are too few questions.
        HeadLoadError: see `drafters.mtp.checkpoint.load_mtp`; more than one module, or one that cannot be saved.
        TrainingDivergedError: the loss is not finite.
    """
    _check_alone(model)
    target = mtp_target(model.hf_model)
    modules = load_mtp(resolve(module), target, torch.float32, model.device, reading)
    if len(modules) > 1:
        raise HeadLoadError(f"{module} has {len(modules)} multi-token-prediction modules; one can be trained")
    head = modules[0]
    deepseek_tensors(head, target.num_layers)  # raises before anything is trained
    self_test_head(head, model.hf_model, model.tokenizer, config.ttt_steps)
    training, measured = answers.split(held_out, config.seed)

    def stored(trained: MtpHead) -> Head:
        with TemporaryDirectory() as folder:
            own = MtpReading(feedback=reading.feedback)
            return load_mtp(save_mtp(trained, folder, target), target, model.dtype, model.device, own)[0]

    judge, save = _judge(model, measured, config.ttt_steps, stored), partial(save_mtp, target=target)
    data, features = TrainingData(training, measured), final_features(model)
    return train(config, head, data, features, judge, output, console, save=save)


def _check_alone(model: SpeculativeModel) -> None:
    if model.head is not None:
        raise InvalidInputError("the target was loaded with a head; load it with draft=None to train one")


def final_features(model: SpeculativeModel) -> Features:
    """The target's states after its final norm and its logits, of right-padded batches."""
    decoder = model.hf_model.get_decoder()

    @torch.no_grad()
    def features(token_ids: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        caught: list[torch.Tensor] = []
        hook = decoder.register_forward_hook(lambda module, args, output: caught.append(output[0]))
        try:
            logits = model.hf_model(input_ids=token_ids, use_cache=False).logits
        finally:
            hook.remove()
        return caught[0].float(), logits.float()

    return features


def target_features(model: SpeculativeModel, taps: tuple[int, ...]) -> Features:
    """The target's tapped states and logits of right-padded batches, through transformers' own forward.

    The tuple form of `output_hidden_states` is used: index b is boundary b below N in every release. The causal mask
    alone keeps padding on the right out of the real tokens.

    Raises:
        InvalidInputError: a tap is not one of the boundaries 0 … N-1.
    """
    num_layers = len(model.target.runner.group.attention_specs)
    if FINAL_NORM in taps or max(taps) >= num_layers:
        raise InvalidInputError(f"taps {taps}: to train, boundaries 0 … {num_layers - 1} can be tapped")

    @torch.no_grad()
    def features(token_ids: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.hf_model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[tap] for tap in taps], -1).float(), out.logits.float()

    return features


def _judge(
    model: SpeculativeModel, measured: AnswerSet, num_drafts: int, finished: Callable[[TrainedHead], Head]
) -> Callable[[TrainedHead], Mapping[str, float]]:
    """Acceptance of the finished head in a real engine on held-out prompts; `finished` makes it ready for that."""
    count = min(len(measured), _JUDGED_PROMPTS)
    prompts = [measured.sequence(i)[: measured.answer_starts[i]].tolist() for i in range(count)]

    def judge(head: TrainedHead) -> Mapping[str, float]:
        trial = SpeculativeModel.from_pretrained(
            model.hf_model,
            draft=finished(head),
            num_speculative_tokens=num_drafts,
            tokenizer=model.tokenizer,
            max_model_len=model.config.max_model_len,
            backend=model.backend_name,
        )
        completions = trial.generate(prompts, SamplingParams(max_new_tokens=512))
        return {"tau": pool_requests([c.stats for c in completions]).tau}

    return judge
