"""Fingerprints: short texts that differ when a model's weights or configuration differ."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.hf.weights import memory_of
from drafters.base import Head
from specdec.options.generation_config import eos_ids
from specdec.values import without
from specdec.wrapped.group import ALONE, Group

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element, to look at bits instead of numbers."""
_CHUNK = 2**24
_Mark = tuple[str, tuple[int, ...], str, int, list[int]]
"""A tensor's name, shape, dtype, sum of all elements' bits, and some elements' bits."""
_SAMPLES = 64
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
"""Configuration keys about a model's origin or about how it is run, which do not change its results."""


@torch.no_grad()
def weights_fingerprint(module: torch.nn.Module, whole: bool = True) -> str:
    """16 hex digits over names, shapes, dtypes and values of all parameters and stored buffers; of quantised weights
    that are made of several tensors, over each of them.

    Of each tensor, the sum of all elements' bits as integers (exact in any order, so the same on every device) and 64
    evenly spaced elements are hashed: one pass over the memory, no copy to the host.
    whole: if False, without the sum: a large model is not read.
    """
    return _digits("".join(map(repr, _marks(module, whole))))


def tokens_fingerprint(head: Head, device: torch.device) -> str:
    """16 hex digits over the target's tokens that a head drafts on; they may be no part of its weights."""
    ids = head.to_target_ids(torch.arange(head.draft_vocab_size, device=device)).tolist()
    return _digits(json.dumps(ids))


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _marks(module: torch.nn.Module, whole: bool = True) -> list[_Mark]:
    """Marks of all stored tensors, by name; of every part of quantised weights that are made of several tensors.

    whole: sum all elements; else that sum is 0.
    """
    stored = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    parts = [(f"{n}.{i}" if i else n, part) for n, t in stored.items() for i, part in enumerate(memory_of(t))]
    found = []
    for name, tensor in sorted(parts, key=lambda part: part[0]):
        # All elements in a row [n], as integers of the same size (complex numbers as pairs).
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = plain.detach().reshape(-1).contiguous()
        bits = flat.view(_INTEGERS[flat.element_size()])
        total = sum(int(chunk.sum(dtype=torch.int64)) for chunk in bits.split(_CHUNK)) if whole else 0
        # float64: float32 has no exact places beyond 2**24.
        places = torch.linspace(0, max(len(bits) - 1, 0), min(_SAMPLES, len(bits)), dtype=torch.float64).long()
        sample = bits[places.to(bits.device)].tolist()
        found.append((name, tuple(tensor.shape), str(tensor.dtype), total, sample))
    return found


def target_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits over a target's weights, configuration and end tokens; not over its name or place."""
    return _with_configuration(model, weights_fingerprint(model))


def _with_configuration(model: PreTrainedModel, weights: str) -> str:
    config = without(model.config.to_dict(), _NOT_THE_MODEL)
    parts = (weights, json.dumps(config, sort_keys=True, default=str), sorted(eos_ids(model.generation_config)))
    return _digits(repr(parts))


@torch.no_grad()
def shared_fingerprint(model: PreTrainedModel, group: Group = ALONE) -> tuple[str, list[str]]:
    """Fingerprints of a target, however it is divided, and of each process's share of it. All of its group's processes
    call it.

    The first, over weights, configuration and end tokens, is the same for any number of processes: of each tensor of
    the whole model it has the number of elements and the sum of all bits, which parts add up to, but no places, so a
    tensor with rows in another order is the same. The others, of each share of the weights, have places too, and are
    comparable between equal numbers of processes. Each has 16 hex digits.
    """
    marks = _marks(model)
    own = _digits(repr(marks))
    pairs = [(math.prod(shape), total) for _, shape, _, total, _ in marks]
    every = group.gather([[*map(_wrapped, pair)] for pair in [*pairs, (int(own, 16), 0)]])
    shares = [f"{rows[-1][0] % 2**64:016x}" for rows in every]
    steps = [group.copies(mark[0]) for mark in marks]
    totals = [map(sum, zip(*(rows[i] for rows in every[::step]), strict=True)) for i, step in enumerate(steps)]
    names = [(m[0], m[2], count, _wrapped(total)) for m, (count, total) in zip(marks, totals, strict=True)]
    return _with_configuration(model, _digits(repr(names))), shares


def fingerprint_of_target(engine: Any) -> tuple[str, list[str]]:
    """`shared_fingerprint` of an engine's target, for `Group.run`."""
    return shared_fingerprint(engine.target.hf_model, engine.target.group)


def _wrapped(number: int) -> int:
    """As int64, modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63
