"""The load-time self-tests, before anybody relies on what was loaded.

The paged target is compared with the model's own eager forward; a head whose checkpoint does not say how it was trained
to be read is checked on a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from attention.batch.metadata import single_batch_arena, stage
from attention.hf.interface import attention_implementation
from drafters.base import Head, InputConvention
from drafters.loops.chain.index import rows_batch
from specdec.errors import CacheTooSmallError, UnsupportedModelError
from specdec.ops.linear import invariant_linear
from specdec.requests.prompts import encode_prompts
from specdec.target.target import Target

_PROMPT_LENS = np.array([19, 5, 11])
_VERIFY_LEN = 4
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.2}
"""Largest rms error of a token's logits over their rms, by dtype; what comes out wrong is off by about 1."""
_EIGHT_BIT_TOLERANCE = 0.5
"""The same with a cache in 8 bits, which rounds every key and value by 2.6 % rms; cut-off ones come out wrong."""

_TEXT = (
    "Anna has 12 apples and buys 8 more at the market. She gives 5 of them to her brother. She bakes a pie with 6. "
    "How many apples does she have now. She has 12 plus 8 which is 20 apples. After giving away 5 there were 15 left. "
    "The pie took 6 of them so 9 apples are left. The sun was low over the river when the old man walked home from "
    "the field. He had worked since the early morning and was glad that the day was over. At home his wife had made "
    "soup with carrots and onions. They sat at the table and talked about their son who lives in the city. He writes "
    "2 letters in a month and comes home 3 times in a year. In 4 years he wrote 96 letters. That is 24 letters in "
    "each year. A train leaves the station at 9 and drives 60 miles in an hour. After 3 hours it has gone 180 miles. "
    "The children went to school and learned to read and to write. When it rained they played inside."
)
"""Plain enough for any tokenizer and any target that knows English."""
_MOST_TOKENS = 256
_BATCHES, _LARGE_BATCH = (1, 16, 17, 48, 200), 600
"""Tokens for every tile of `triton_invariant_linear`."""


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
    lens = _PROMPT_LENS + _VERIFY_LEN
    table, ids = _scrambled_table(target, lens), _dummy_ids(target, lens)
    no_tokens = np.zeros(len(ids), np.int64)
    ours = [_paged(target, ids, no_tokens, _PROMPT_LENS, table)]
    ours.append(_paged(target, ids, _PROMPT_LENS, lens, table))
    errors = []
    for row, own in enumerate(_eager(target, ids)):
        pieces = own.split((int(_PROMPT_LENS[row]), _VERIFY_LEN))
        errors += [_error(ours[phase][row], right) for phase, right in enumerate(pieces)]
    error = float(torch.stack(errors).max())
    eight_bits = target.runner.group.format.dtype is not None
    limit = _EIGHT_BIT_TOLERANCE if eight_bits else _TOLERANCE[target.hf_model.dtype]
    if not error <= limit:
        hint = "; the KV cache is in 8 bits: give kv_cache_scales, or kv_cache_dtype='auto'" if eight_bits else ""
        raise UnsupportedModelError(
            f"{type(target.hf_model).__name__} comes out wrong through the paged attention: relative logit error "
            f"{error:.2g} against its own eager forward (allowed for {target.hf_model.dtype}: {limit:g}){hint}"
        )
    return error


@torch.inference_mode()
def invariance_test(target: Target, model: Callable[..., Any]) -> None:
    """Read three rows at once and again in pieces, and compare all logits bit by bit.

    Args:
        model: the form of the target that is tested, see `Target.forward`.

    Raises:
        UnsupportedModelError: a token's logits depend on what else is in the batch, or are not those of the model.
        CacheTooSmallError: the cache cannot hold the test's tokens.
    """
    ends = _lens_that_fit(target)
    table, ids = _scrambled_table(target, ends), _dummy_ids(target, ends)
    no_tokens = np.zeros(len(ids), np.int64)
    whole = _paged(target, ids, no_tokens, ends, table, model)
    error = max(float(_error(own, right)) for own, right in zip(whole, _eager(target, ids), strict=True))
    if not error <= _TOLERANCE[target.hf_model.dtype]:
        raise UnsupportedModelError(
            f"{type(target.hf_model).__name__} comes out wrong when compiled: error {error:.2g}"
        )
    cuts = (ends - _VERIFY_LEN, ends - 1)
    pieces = [(slice(None), no_tokens, cuts[0])] + [(slice(None), cut, ends) for cut in cuts]
    pieces += [(slice(row, row + 1), cut, ends) for row in range(len(ids)) for cut in cuts]
    for rows, start, stop in pieces:
        found = _paged(target, ids[rows], start[rows], stop[rows], table[rows], model)
        for right, own, a, b in zip(whole[rows], found, start[rows], stop[rows], strict=True):
            if not torch.equal(own, right[a:b]):
                raise UnsupportedModelError(
                    f"{type(target.hf_model).__name__} is not batch-invariant: the logits of tokens {a} to {b} of a "
                    f"row of {len(right)} differ by up to {float((own - right[a:b]).abs().max()):.2g} when they are "
                    "read apart; use backend='flashinfer'"
                )


@torch.inference_mode()
def products_test(model: PreTrainedModel) -> None:
    """Multiply by a weight of every shape of the model in batches of all sizes of tiles, and compare bit by bit.

    Raises:
        UnsupportedModelError: on this device the result for a token depends on how many there are.
    """
    weights = {m.weight.shape: m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
    for weight in weights.values():
        generator = torch.Generator(weight.device).manual_seed(0)  # the user's own stays as it is
        shape = (_LARGE_BATCH, weight.shape[1])
        x = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
        whole = invariant_linear(x, weight, None)
        if not all(torch.equal(invariant_linear(x[:n], weight, None), whole[:n]) for n in _BATCHES):
            raise UnsupportedModelError(
                f"products with a weight of {list(weight.shape)} are not batch-invariant on "
                f"{torch.cuda.get_device_name(weight.device)}; use backend='flashinfer'"
            )


@torch.inference_mode()
def self_test_head(head: Head | None, model: PreTrainedModel, tokenizer: Any, num_drafts: int) -> None:
    """Read a short text with the target and check on it how the head is read; heads without such a check pass.

    Args:
        num_drafts: K; with 0 nothing is judged.

    Raises:
        HeadLoadError: see `drafters.base.InputConvention`.
    """
    if isinstance(head, InputConvention) and num_drafts:
        head.check_reading(*read_text(model, tokenizer), num_drafts)


def read_text(model: PreTrainedModel, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A short plain text: its token ids [T] int64 and the target's states after its final norm [T, H]."""
    (ids,) = encode_prompts(_TEXT, tokenizer)
    token_ids = torch.tensor(ids[:_MOST_TOKENS], device=model.device)
    return token_ids, model.get_decoder()(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]


def _error(ours: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Median over tokens of rms error over rms; NaN where a token has NaN."""
    errors = (ours - right).double().pow(2).mean(-1).sqrt() / right.double().pow(2).mean(-1).sqrt()
    return errors.median()


def _lens_that_fit(target: Target) -> np.ndarray:
    """Lengths of three rows of which one goes beyond the kernels' tiles, where the cache has room for three of it."""
    group, lens = target.runner.group, _PROMPT_LENS + _VERIFY_LEN
    most = getattr(target.hf_model.config.get_text_config(), "max_position_embeddings", _MOST_TOKENS)
    room = (group.num_pages - 1) // len(lens) * group.page_size
    lens[0] = max(lens[0], min(_MOST_TOKENS, most, room))
    return lens


def _scrambled_table(target: Target, lens: np.ndarray) -> np.ndarray:
    """A block table for rows of these lengths."""
    group = target.runner.group
    width = -(-int(lens.max()) // group.page_size)
    pages = np.random.default_rng(0).permutation(np.arange(1, group.num_pages))[: len(lens) * width]
    if len(pages) < len(lens) * width:
        raise CacheTooSmallError(
            f"the KV cache has {group.num_pages - 1} pages of {group.page_size} tokens; at least "
            f"{len(lens) * width} are needed"
        )
    return pages.reshape(len(lens), width).astype(np.int32)


def _dummy_ids(target: Target, lens: np.ndarray) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embedding: torch.Tensor = target.hf_model.get_input_embeddings().weight  # type: ignore[assignment]
    vocab = min(target.vocab_size, embedding.shape[0])
    return [torch.randint(vocab, (n,), generator=generator).to(target.hf_model.device) for n in lens.tolist()]


def _paged(
    target: Target,
    ids: list[torch.Tensor],
    start: np.ndarray,
    stop: np.ndarray,
    table: np.ndarray,
    model: Callable[..., Any] | None = None,
) -> list[torch.Tensor]:
    """Logits [stop - start, V] of each row, float32."""
    query_start_loc = np.concatenate([[0], np.cumsum(stop - start)]).astype(np.int32)
    batch = rows_batch(query_start_loc, start, table, target.runner.group.page_size)
    arena, bucket = single_batch_arena(batch.num_reqs, batch.num_tokens, table.shape[1], target.hf_model.device)
    planned = target.runner.plan(stage(batch, arena, bucket))
    flat = torch.cat([row[a:b] for row, a, b in zip(ids, start, stop, strict=True)])
    logits = target.forward(flat, planned, torch.arange(len(flat), device=flat.device), model).logits
    return list(logits.float().split((stop - start).tolist()))


def _eager(target: Target, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    model = target.hf_model
    configs = (model.config, model.config.get_text_config())
    with attention_implementation(configs, "eager"):
        return [model(input_ids=row[None], use_cache=False).logits[0].float() for row in ids]
