"""The load-time self-test: the paged target against the model's own eager forward, before anybody relies on it."""

from __future__ import annotations

import numpy as np
import torch

from attention.hf import attention_implementation
from attention.metadata import single_batch_arena, stage
from drafters.inputs import rows_batch
from specdec.errors import CacheTooSmallError, UnsupportedModelError
from specdec.target import Target

_PROMPT_LENS = np.array([19, 5, 11])
_VERIFY_LEN = 4
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.2}
"""Largest rms error of a token's logits over their rms, by dtype; what comes out wrong is off by about 1."""


@torch.inference_mode()
def self_test(target: Target) -> float:
    """Read three ragged dummy prompts, then four more tokens each, and compare all logits with the eager forward.

    Returns:
        The largest error of the six pieces, a piece being one row's prompt or its verification. Its error is the median
        over its tokens of rms error over rms of the logits: a flipped expert of one token does not count, a wrong row
        or a wrong verification does.

    Raises:
        UnsupportedModelError: the target comes out wrong through the paged attention.
        CacheTooSmallError: the cache cannot hold the test's tokens.
    """
    table = _scrambled_table(target)
    ids = _dummy_ids(target)
    no_tokens = np.zeros(len(ids), np.int64)
    ours = [_paged(target, ids, no_tokens, _PROMPT_LENS, table)]
    ours.append(_paged(target, ids, _PROMPT_LENS, _PROMPT_LENS + _VERIFY_LEN, table))
    errors = []
    for row, own in enumerate(_eager(target, ids)):
        pieces = own.split((int(_PROMPT_LENS[row]), _VERIFY_LEN))
        errors += [_error(ours[phase][row], right) for phase, right in enumerate(pieces)]
    error = float(torch.stack(errors).max())
    limit = _TOLERANCE[target.hf_model.dtype]
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(target.hf_model).__name__} comes out wrong through the paged attention: relative logit error "
            f"{error:.2g} against its own eager forward (allowed for {target.hf_model.dtype}: {limit:g})"
        )
    return error


def _error(ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Median over tokens of rms error over rms; NaN where a token has NaN."""
    errors = (ours - right).double().pow(2).mean(-1).sqrt() / right.double().pow(2).mean(-1).sqrt()
    return errors.median()


def _scrambled_table(target: Target) -> np.ndarray:
    group = target.runner.group
    width = -(-int((_PROMPT_LENS + _VERIFY_LEN).max()) // group.page_size)
    pages = np.random.default_rng(0).permutation(np.arange(1, group.num_pages))[: len(_PROMPT_LENS) * width]
    if len(pages) < len(_PROMPT_LENS) * width:
        raise CacheTooSmallError(
            f"the KV cache has {group.num_pages - 1} pages of {group.page_size} tokens; at least "
            f"{len(_PROMPT_LENS) * width} are needed"
        )
    return pages.reshape(len(_PROMPT_LENS), width).astype(np.int32)


def _dummy_ids(target: Target) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embedding: torch.Tensor = target.hf_model.get_input_embeddings().weight  # type: ignore[assignment]
    vocab = min(target.vocab_size, embedding.shape[0])
    lens = (_PROMPT_LENS + _VERIFY_LEN).tolist()
    return [torch.randint(vocab, (n,), generator=generator).to(target.hf_model.device) for n in lens]


def _paged(
    target: Target, ids: list[torch.Tensor], start: np.ndarray, stop: np.ndarray, table: np.ndarray
) -> list[torch.Tensor]:
    """Logits [stop - start, V] of each row, float32."""
    query_start_loc = np.concatenate([[0], np.cumsum(stop - start)]).astype(np.int32)
    batch = rows_batch(query_start_loc, start, table, target.runner.group.page_size)
    arena, bucket = single_batch_arena(batch.num_reqs, batch.num_tokens, table.shape[1], target.hf_model.device)
    planned = target.runner.plan(stage(batch, arena, bucket))
    flat = torch.cat([row[a:b] for row, a, b in zip(ids, start, stop, strict=True)])
    logits = target.forward(flat, planned, torch.arange(len(flat), device=flat.device)).logits
    return list(logits.float().split((stop - start).tolist()))


def _eager(target: Target, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    model = target.hf_model
    configs = (model.config, model.config.get_text_config())
    with attention_implementation(configs, "eager"):
        return [model(input_ids=row[None], use_cache=False).logits[0].float() for row in ids]
