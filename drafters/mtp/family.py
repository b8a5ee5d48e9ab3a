"""Multi-token-prediction modules as a family of draft heads: the functions of `drafters.families.FamilyCode`."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, LazyFacts, Recipe
from drafters.checkpoints.config_fields import FamilyOptions, HeadReport
from drafters.checkpoints.tensor_files import CheckpointPath, locate
from drafters.errors import HeadLoadError
from drafters.mtp.checkpoint import deepseek_tensors, describe_mtp, load_mtp, save_mtp
from drafters.mtp.convention import MtpConvention
from drafters.mtp.head import MtpHead, MtpStack
from drafters.mtp.spec import mtp_target


def load_head(
    path: CheckpointPath, model: PreTrainedModel, facts: LazyFacts, options: FamilyOptions
) -> MtpHead | MtpStack:
    """Load the modules of a checkpoint for a target, in its dtype and on its device.

    Raises:
        HeadLoadError, HeadMismatchError, InvalidInputError: see `load_mtp`, `mtp_target` and `MtpConvention`.
    """
    target = mtp_target(model)
    convention = _convention(options)
    modules = load_mtp(path, target, model.dtype, model.device, convention)
    head = modules[0] if len(modules) == 1 else MtpStack(modules)
    head.checkpoint_report = describe_mtp(path, target, convention)
    return head


def describe_head(path: CheckpointPath, options: FamilyOptions) -> HeadReport:
    """Raises InvalidInputError: a module's files do not suffice without its target."""
    raise InvalidInputError(f"{path}: a multi-token-prediction module is read with its target: give --target")


def target_of(path: CheckpointPath) -> str | None:
    """The checkpoint that holds a module, if it is a whole model."""
    return str(path) if (locate(path) / "tokenizer_config.json").exists() else None


def not_exportable(path: CheckpointPath) -> str | None:
    """Why a module cannot be written in the layout of another project."""
    return (
        "a multi-token-prediction module has no layout of its own: vLLM and SGLang read it from the target's "
        "checkpoint; HEAD must be an EAGLE-3 head"
    )


def recipe(
    model: PreTrainedModel, facts: LazyFacts, longest: int, seed: int, options: FamilyOptions
) -> Recipe[MtpHead]:
    """Go on training a module on its own outputs: released ones were trained for one draft.

    Args:
        options: module (folder or hub name of its checkpoint), mtp_concat and mtp_feedback.

    Raises:
        HeadLoadError: see `load_mtp`; the checkpoint has more than one module, or one that cannot be saved.
    """
    target = mtp_target(model)
    convention = _convention(options)
    source = options["module"]
    modules = load_mtp(source, target, torch.float32, model.device, convention)
    if len(modules) > 1:
        raise HeadLoadError(f"{source} has {len(modules)} multi-token-prediction modules; one can be trained")
    head = modules[0]
    deepseek_tensors(head, target.num_layers)  # raises before anything is trained

    def finished(trained: MtpHead) -> MtpHead:
        with TemporaryDirectory() as folder:
            own = MtpConvention(feedback=convention.feedback)
            return load_mtp(save_mtp(trained, folder, target), target, model.dtype, model.device, own)[0]

    return Recipe(
        aux_layers=(FINAL_NORM,),
        settings={"mtp_concat": convention.concat, "mtp_feedback": convention.feedback},
        start=lambda counts: head,
        finished=finished,
        save=partial(save_mtp, target=target),
        initial=head,
    )


def _convention(options: FamilyOptions) -> MtpConvention:
    given = {name.removeprefix("mtp_"): value for name, value in options.items() if name.startswith("mtp_")}
    return MtpConvention(**given)
