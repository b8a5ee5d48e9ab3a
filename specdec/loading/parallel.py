"""Tensor-parallel loading: what is refused by name, the plan for a configuration, and what transformers is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.utils import is_accelerate_available

from specdec.errors import InvalidInputError, ModelLoadError, UnsupportedModelError
from specdec.loading.auto_classes import AutoClass, model_class
from specdec.loading.checkpoint import Adapter
from specdec.loading.groups import Division
from specdec.options import LoadOptions
from specdec.parallel.plan import Plan, plan_of
from specdec.parallel.ranks import Ranks
from specdec.parallel.shares import take_share
from specdec.parallel.workers import are_open, is_fork
from specdec.values import short
from specdec.wrapped.probing import TargetProbe

_OLDEST = (5, 23)


def check_parallel(target: Any, draft: Any, options: LoadOptions) -> torch.device:
    """Whether such a model can be divided at all, before any process is started; the device of rank 0.

    Raises:
        InvalidInputError: objects in place of names, an option that is not served, too few GPUs, a process group of the
            user's own.
        ModelLoadError: transformers is too old, or accelerate is missing.
    """
    size = options.tensor_parallel_size
    given = f"tensor_parallel_size={size}"
    for what, value in (("target", target), ("draft", draft)):
        if value is not None and not isinstance(value, (str, Path)):
            raise InvalidInputError(
                f"{given}: {what}={short(value)} is an object of this process, and every rank loads its own share; "
                "give its folder or hub name"
            )
    if not hasattr(os, "fork"):
        raise InvalidInputError(f"{given}: served on Linux and other systems with processes of their kind, not here")
    _check_packages(given)
    if options.adapter is not None:
        raise InvalidInputError(_no_adapter(size, f"adapter={short(options.adapter)}"))
    if options.backend == "batch_invariant" and size > 2:
        raise InvalidInputError(
            f"{given}, backend='batch_invariant': sums of more than two ranks may round by their order, which depends "
            "on the size of a batch; give tensor_parallel_size=2, or another backend"
        )
    if is_fork():
        raise InvalidInputError(
            f"{given}: this process is a fork of one with tensor-parallel models, whose ranks and process group it has "
            "not; fork before they are loaded, or start it as a program of its own (multiprocessing: 'spawn')"
        )
    if not are_open() and dist.is_available() and dist.is_initialized():
        raise InvalidInputError(
            f"{given}: this process has a torch.distributed process group of its own; load the model in a process "
            "without one (destroy_process_group() ends it)"
        )
    return _first_device(options.device, size)


def _check_packages(given: str) -> None:
    version = tuple(int(part) for part in transformers_version.split(".")[:2])
    if version < _OLDEST:
        raise ModelLoadError(
            f"{given} needs transformers >= {'.'.join(map(str, _OLDEST))}, which plans and reads shares; this is "
            f"{transformers_version}: pip install 'specdec-hf[parallel]'"
        )
    if not is_accelerate_available():
        raise ModelLoadError(f"{given} needs the package accelerate: pip install 'specdec-hf[parallel]'")


def _first_device(device: Any, size: int) -> torch.device:
    """cpu, or cuda:0. Raises InvalidInputError for any other, and for fewer GPUs than ranks."""
    given = f"tensor_parallel_size={size}"
    place = None if device is None else torch.device("cuda", device) if isinstance(device, int) else None
    if place is None and device is not None:
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidInputError(f"device={short(device)} is not a torch device") from error
    has_cuda = torch.cuda.is_available()
    if place is None:
        place = torch.device("cuda" if has_cuda else "cpu")
    if place.index is not None or place.type not in ("cpu", "cuda"):
        raise InvalidInputError(
            f"{given}, device={short(device)}: rank r runs on cuda:r; leave device out, and choose GPUs by "
            "CUDA_VISIBLE_DEVICES"
        )
    if place.type == "cpu":
        if has_cuda:
            raise InvalidInputError(
                f"{given}, device='cpu': transformers puts shares on this machine's GPUs; hide them with "
                "CUDA_VISIBLE_DEVICES=''"
            )
        return place
    if not has_cuda or torch.cuda.device_count() < size:
        count = torch.cuda.device_count() if has_cuda else 0
        raise InvalidInputError(f"{given}: one GPU for each rank is needed, and torch sees {count}")
    return torch.device("cuda", 0)


def check_divisible(probed: TargetProbe, ranks: Ranks | None) -> None:
    """Refuse what runs on one GPU only.

    Raises:
        UnsupportedModelError: the target has recurrent layers.
    """
    if ranks is not None and probed.recurrent_calls:
        raise UnsupportedModelError(
            f"tensor_parallel_size={ranks.size}: {type(probed.model).__name__} has recurrent layers, whose states are "
            "not divided; load it without tensor_parallel_size"
        )


def check_no_adapter(adapter: Adapter | None, size: int) -> None:
    """Refuse a target that is an adapter itself. adapter: the one of its checkpoint.

    Raises:
        InvalidInputError: it is one.
    """
    if adapter is not None:
        raise InvalidInputError(_no_adapter(size, f"the target is the adapter {adapter}, which"))


def _no_adapter(size: int, what: str) -> str:
    return (
        f"tensor_parallel_size={size}: {what} cannot be applied to shares of weights; merge it and save the merged "
        "model (peft's merge_and_unload), and give its folder"
    )


def check_not_quantised(method: str | None, size: int) -> None:
    """Refuse shares of quantised weights. method: by which they are; None where they are not.

    Raises:
        UnsupportedModelError: they are.
    """
    if method is not None:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: the checkpoint's weights are quantised ({method}), and shares of "
            "those are not served; give a checkpoint in bfloat16, float16 or float32"
        )


def plan_for(config: PreTrainedConfig, found: AutoClass, size: int) -> Plan:
    """The plan of a configuration's model.

    Raises:
        UnsupportedModelError: its code is not transformers' own, or see `plan_of`.
    """
    kind = model_class(config, found)
    if kind is PreTrainedModel:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: model_type={config.model_type!r} is code of its checkpoint, for which there "
            "is no plan"
        )
    with torch.device("meta"):
        return plan_of(kind(config), size)


def told(plan: Plan, size: int) -> dict[str, Any]:
    """What transformers' from_pretrained is given beside the rest."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan=dict(plan.styles))}


class _Meshes:
    """What a load of transformers asks for its meshes: one of all ranks, whose process group is the default one."""

    def __init__(self, ranks: Ranks) -> None:
        self._mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("tp",))

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        """The mesh, whatever dimensions are asked for: no other divides anything."""
        return self._mesh


@contextmanager
def as_rank(ranks: Ranks) -> Iterator[None]:
    """While transformers loads: this rank's device, and a mesh for which no process group is made.

    transformers' own meshes have three dimensions of one rank beside the one of all, for layers and again for experts,
    and torch makes a process group of each: six a load, which nobody uses and which stay until the last model is
    closed. With NCCL they are split off the default one, and on a GPU whose memory is full that has ended the process.
    """
    from transformers.distributed import mixin  # as of 5.23

    meshes: Any = _Meshes(ranks)
    own = mixin.initialize_distributed_mesh
    mixin.initialize_distributed_mesh = lambda distributed_config: (ranks.device, meshes)
    try:
        yield
    finally:
        mixin.initialize_distributed_mesh = own


def least_of_all(cache: Division, ranks: Ranks) -> Division:
    """The tokens that all ranks have room for: their schedules must be the same."""
    tokens, *windowed = ranks.collectives.least([cache.tokens, *cache.windowed])
    return Division(tokens, tuple(windowed))


__all__ = [
    "as_rank",
    "check_divisible",
    "check_no_adapter",
    "check_not_quantised",
    "check_parallel",
    "least_of_all",
    "plan_for",
    "take_share",
    "told",
]
