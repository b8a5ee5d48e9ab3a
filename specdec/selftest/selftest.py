"""The load-time self-tests, which run before a loaded model is used.

The paged target is compared with the model's own eager forward; a head whose checkpoint does not record its input
convention is checked on a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from attention.backends.limits import HALF
from attention.hf.weights import has_quantised, is_plain_weight
from drafters.base import HasInputConvention, Head
from specdec.errors import InvalidInputError, UnsupportedModelError
from specdec.requests.prompts import encode_prompts
from specdec.selftest.eager_reference import (
    VERIFY_LEN,
    DummyRows,
    ReadPiece,
    errors_named,
    fewest_pages,
    likely_cause,
    read_eager,
    relative_errors,
    verifications,
)
from specdec.selftest.routers import RoutedReader, check_choices, has_mixtures
from specdec.selftest.twin import TwinReport, in_words
from specdec.user_warnings import warn_user
from specdec.values import Function
from specdec.wrapped.probing import TargetProbe, decoder_of, last_states
from specdec.wrapped.target import Target

_PROMPT_LENS = np.array([19, 5, 11])
_NEIGHBOURS = 32
_AT_A_TIME = 16
_LONG_ROW = 256
_LONG_ROW_ON_CPU = 64
_LONGEST_ROW = 512
"""Longest row of the real weights' test in float32; on a CPU, whose backend has no tiles and has read longer rows of
the twin; and without a twin."""
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.2}
"""Largest rms error of a token's logits relative to their rms, by dtype; wrong logits are off by about 1."""
_EIGHT_BIT_TOLERANCE = 0.5
"""The same with a cache in 8 bits, which rounds every key and value by 2.6 % rms; errors by clipped values exceed
it."""
_ROUTED_TOLERANCE = 0.5
"""The same of a compiled mixture in half precision, whose choices of experts cannot be given to the eager forward:
rounding decides many of 512. Qwen3-Next with random weights: 0.26."""
_ROUNDED_TOLERANCE = 0.1
"""The same of a model whose layers round their activations to 8 bits: a value between two steps goes to either by an
error of 1e-7, and so do those that are computed from it. Measured: 0.004 to 0.009 (tests/public/test_quantised.py)."""

SELF_TEST_TEXT = (
    "Anna has 12 apples and buys 8 more at the market. She gives 5 of them to her brother. She bakes a pie with 6. "
    "How many apples does she have now. She has 12 plus 8 which is 20 apples. After giving away 5 there were 15 left. "
    "The pie took 6 of them so 9 apples are left. The sun was low over the river when the old man walked home from "
    "the field. He had worked since the early morning and was glad that the day was over. At home his wife had made "
    "soup with carrots and onions. They sat at the table and talked about their son who lives in the city. He writes "
    "2 letters in a month and comes home 3 times in a year. In 4 years he wrote 96 letters. That is 24 letters in "
    "each year. A train leaves the station at 9 and drives 60 miles in an hour. After 3 hours it has gone 180 miles. "
    "The children went to school and learned to read and to write. When it rained they played inside."
)
"""Plain enough for any tokenizer and any target trained on English."""
_MOST_TOKENS = 256
_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 31, 32, 33, 48, 64, 65, 200)
_LARGE_BATCH = 600
"""Tokens for every tile of `triton_invariant_linear`, and of oneDNN's kernels."""


def check_target(
    target: Target, probed: TargetProbe, max_model_len: int, report: TwinReport, quick: bool = False
) -> float:
    """Test FP8 operators and recurrent layers' kernels, then the real weights (`self_test`); the largest error.

    A model without a twin (`report` is `twin.twin_test`'s, and names the threshold past which a model is wrong) is
    itself read in rows of up to 512 tokens, and a SpecdecWarning names the untested parts. quick: with one, the real
    weights read short rows alone.

    Raises:
        UnsupportedModelError, CacheTooSmallError: as `self_test`; the former also of a quantised target whose results
            depend on the batch, and of recurrent layers' kernels with wrong results.
    """
    room = min(max_model_len, _room(target))
    half = probed.model.dtype in HALF
    if has_quantised(probed.model):
        from specdec.selftest.quantised import quantised_self_test

        quantised_self_test(probed.model, target.fp8)
    if target.states is not None:
        from specdec.selftest.recurrences import recurrence_self_test

        recurrence_self_test(target.states)
    if report.unbuilt is None:
        long = _LONG_ROW_ON_CPU if target.hf_model.device.type == "cpu" else _LONG_ROW
        return self_test(target, 0 if half or quick else min(long, room))
    longest = max(min(_LONGEST_ROW, room), int(_PROMPT_LENS.max()) + VERIFY_LEN)
    error = self_test(target, longest)
    beyond = [threshold for threshold in report.passed if threshold.value >= longest]
    untested = [f"rows beyond {in_words(beyond)}"] if beyond else []
    untested += [f"errors below {_TOLERANCE[probed.model.dtype]:g}"] if half else []
    if untested:
        warn_user(
            f"{type(probed.model).__name__}: {' and '.join(untested)} were not tested: there is no small copy of it to "
            f"test them by: {report.unbuilt}. Its own rows of up to {longest} tokens came out right. Compare a long "
            "answer with the model's own generate, or give a smaller max_model_len"
        )
    return error


def self_test(target: Target, longest: int = 0) -> float:
    """Read three ragged dummy prompts, then four more tokens each, and compare all logits with the eager forward.

    The verification is read once more as a batch of one row with logits for its last token alone. A recurrent target is
    verified twice, so that drafts are rejected and replayed (see `verifications`), and then a row is read from its
    start. Layers do not round their activations to 8 bits here, where that can be switched off
    (`unrounded_activations`), so that the comparison is about attention; `fp8_self_test` tests specdec's FP8 layers.
    longest: tokens of the longest row, at least 23 (26 for a recurrent target), more where no other test reads long
    rows.

    Returns:
        The largest error of the pieces, a piece being one row's prompt or its verification, see `_error`: a flipped
        expert of one token does not count, a wrong row or a wrong verification does.

    Raises:
        UnsupportedModelError: the target's results through the paged attention are wrong or NaN, or it fails there.
        CacheTooSmallError: the cache cannot hold the test's tokens.
    """
    if not has_quantised(target.hf_model):
        return _self_test(target, longest)
    from specdec.wrapped.quantised_layers import unrounded_activations

    with unrounded_activations(target.hf_model):
        return _self_test(target, longest)


@torch.inference_mode()
def _self_test(target: Target, longest: int) -> float:
    none = np.zeros_like(_PROMPT_LENS)
    tail = verifications(target, none)[-1].stop
    lens = _PROMPT_LENS + tail
    lens[0] = max(lens[0], longest)
    prompts = lens - tail
    rows = DummyRows.of(target, lens)
    alone = ReadPiece(prompts if target.states is None else none, lens, (0,))  # a state is at its row's end
    pieces = [ReadPiece(none, prompts, range(len(lens))), *verifications(target, prompts)]
    error = _largest(_errors(rows, [*pieces, alone]))
    if _fits(target, error):
        return error
    chosen = ""
    if has_mixtures(target.hf_model):
        error = _largest(_routed_errors(rows, pieces, alone))
        chosen = " that is given the same choices of experts"
        if _fits(target, error):
            return error
    hint = "; the KV cache is in 8 bits: give kv_cache_scales, or kv_cache_dtype='auto'" if _eight_bits(target) else ""
    cause = "" if hint else likely_cause(target.hf_model)
    found = "logits with NaN" if error != error else f"relative logit error {error:.2g}"
    raise UnsupportedModelError(
        f"{type(target.hf_model).__name__} comes out wrong through the paged attention{cause}: {found} "
        f"against its own eager forward{chosen} (allowed for {target.hf_model.dtype}: {_limit(target, error):g}){hint}"
    )


def _fits(target: Target, error: float) -> bool:
    """Whether rounding explains an error, in every process: one that read on alone would wait for the others."""
    return bool(target.group.least([int(error <= _limit(target, error))])[0])


def _errors(rows: DummyRows, pieces: list[ReadPiece]) -> list[Tensor]:
    """The error of each row of each piece against the model's own eager forward."""
    with errors_named(rows.target.hf_model, "its own eager forward reads one row of dummy tokens"):
        right = read_eager(rows.target.hf_model, rows.ids)
    return [error for piece in pieces for error in _compared(_read(rows, piece), piece, right)]


def _routed_errors(rows: DummyRows, pieces: list[ReadPiece], alone: ReadPiece) -> list[Tensor]:
    """The same against an eager forward with the paged one's choices of experts, and of the states these read.

    Raises:
        UnsupportedModelError: more choices of a mixture differ than rounding explains.
    """
    model = rows.target.hf_model
    reader = RoutedReader()

    def read(piece: ReadPiece) -> list[Tensor]:
        read_rows = list(piece.rows)
        with reader.reading(model, piece.start[read_rows], piece.stop[read_rows]):
            return _read(rows, piece)

    found = [(read(piece), piece) for piece in pieces]
    right, calls = zip(*(reader.read_eager(model, row, ids) for row, ids in enumerate(rows.ids)), strict=True)
    errors = [error for ours, piece in found for error in _compared(ours, piece, right)]
    for row, own in enumerate(calls):
        errors += [_error(ours.states, theirs.states) for ours, theirs in zip(reader.rows[row], own, strict=True)]
    check_choices(model, reader, calls)
    last = read(alone)
    return errors + _compared(last, alone, [reader.read_eager(model, 0, rows.ids[0])[0]])


def _read(rows: DummyRows, piece: ReadPiece) -> list[Tensor]:
    """Logits of each row of a piece; of a batch of one its last token's, keeping aux hidden states as rounds do.

    Aux hidden states are kept if their buffer has room for the tokens.
    """
    model = rows.target.hf_model
    if len(piece.rows) > 1:
        with errors_named(model, "three rows are read through the paged attention"):
            return rows.read_by_row(piece)
    num_tokens = int((piece.stop - piece.start)[0])
    keep = len(rows.target.aux_hidden_states(num_tokens)) == num_tokens
    with errors_named(model, "a batch of one row is read through the paged attention"):
        return [rows.read(piece, torch.tensor([num_tokens - 1], device=model.device), keep_aux=keep)]


def _compared(ours: list[Tensor], piece: ReadPiece, right: Sequence[Tensor]) -> list[Tensor]:
    """The error of each row of a piece: of its right tokens or, where its last token alone was read, of that."""
    pairs = zip(ours, piece.right_tokens(right), strict=True)
    return [_error(own[: len(theirs)], theirs[-len(own) :]) for own, theirs in pairs]


def _largest(errors: list[Tensor]) -> float:
    return float(torch.stack(errors).max())


def _eight_bits(target: Target) -> bool:
    return target.runner.runners[0].group.format.dtype is not None


def _limit(target: Target, error: float) -> float:
    """Error that rounding explains."""
    limit = _EIGHT_BIT_TOLERANCE if _eight_bits(target) else _TOLERANCE[target.hf_model.dtype]
    if limit < error <= _ROUNDED_TOLERANCE:
        from specdec.selftest.quantised import rounds_activations

        return _ROUNDED_TOLERANCE if rounds_activations(target.hf_model) else limit
    return limit


@torch.inference_mode()
def invariance_test(target: Target, model: Function | None = None, rows: Any = None) -> None:
    """Read rows at once and again in pieces, by the form `model` of the target, and compare logits bit by bit.

    Its own form was compared with its eager forward before. rows: `DummyRows`, by default three, one of them long;
    those given are also cut in the middle, and read whole by themselves.

    Raises:
        UnsupportedModelError: a token's logits depend on the rest of the batch, or differ from the model's.
        CacheTooSmallError: the cache cannot hold the test's tokens.
    """
    if given := rows is not None:
        ends = np.array([*map(len, rows.ids)])
    else:
        # Lengths of three rows of which one goes beyond the kernels' tiles, where the cache has room for three of it.
        ends = _PROMPT_LENS + VERIFY_LEN
        most = getattr(target.hf_model.config.get_text_config(), "max_position_embeddings", _MOST_TOKENS)
        ends[0] = max(ends[0], min(_MOST_TOKENS, most, _room(target)))
        rows = DummyRows.of(target, ends)
    none = np.zeros_like(ends)
    everyone = range(len(ends))
    if model is not None and not given:  # compiled here, by tokens as many in any engine: kernels are chosen by them
        rows.read_by_row(ReadPiece(none, _PROMPT_LENS, everyone), model)
    whole = rows.read_by_row(ReadPiece(none, ends, everyone), model)
    right = whole if model is None else read_eager(target.hf_model, rows.ids)
    error = _largest([_error(*pair) for pair in zip(whole, right, strict=True)])
    mixes = target.hf_model.dtype in HALF and has_mixtures(target.hf_model)
    if not error <= (_ROUTED_TOLERANCE if mixes else _TOLERANCE[target.hf_model.dtype]):  # "not <=": NaN is one, too
        raise UnsupportedModelError(
            f"{type(target.hf_model).__name__} comes out wrong when compiled: error {error:.2g}"
        )
    cuts = [ends - VERIFY_LEN, ends - 1] + [none, ends // 2] * given
    pieces = [ReadPiece(none, cuts[0], everyone)]
    pieces += [ReadPiece(cut, ends, chosen) for chosen in (everyone, *((row,) for row in everyone)) for cut in cuts]
    for piece in pieces:
        if target.states is not None and piece.start.any():  # its states are at the rows' ends
            rows.read_by_row(ReadPiece(none, piece.start, everyone), model)
        for row, own, theirs in zip(piece.rows, rows.read_by_row(piece, model), piece.right_tokens(whole), strict=True):
            if not torch.equal(own, theirs):
                raise UnsupportedModelError(
                    f"{type(target.hf_model).__name__} is not batch-invariant: the logits of tokens {piece.start[row]} "
                    f"to {piece.stop[row]} of a row of {ends[row]} differ by up to "
                    f"{float((own - theirs).abs().max()):.2g} when they are read apart; use another backend"
                )


@torch.inference_mode()
def matmul_test(model: PreTrainedModel) -> None:
    """Multiply by a weight of every shape of the model in batches of all sizes of tiles, and compare bit by bit.

    On a CPU by its linear layers as they are.

    Raises:
        UnsupportedModelError: on this device a token's result depends on the number of tokens.
    """
    from specdec.ops.linear import invariant_linear

    product = F.linear if model.device.type == "cpu" else invariant_linear
    plain = (m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and is_plain_weight(m.weight))
    for weight in {weight.shape: weight for weight in plain}.values():
        generator = torch.Generator(weight.device).manual_seed(0)  # the user's own stays as it is
        shape = (_LARGE_BATCH, weight.shape[1])
        x = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
        whole = product(x, weight, None)
        if not all(torch.equal(product(x[:n], weight, None), whole[:n]) for n in _BATCHES):
            raise UnsupportedModelError(
                f"matmuls with a weight of {list(weight.shape)} are not batch-invariant here; use another backend"
            )


@torch.inference_mode()
def experts_test(model: PreTrainedModel) -> None:
    """Multiply by experts of every shape, as rounds from graphs do, and compare bit by bit.

    Up to more tokens than `better_by_many` needs, by every tiling.

    Raises:
        UnsupportedModelError: on this device a token's result depends on the number of tokens.
    """
    from specdec.ops.mixtures.choice import capturable_experts, mixtures

    for experts in {each.down_proj.shape: each for each in mixtures(model)}.values():
        down = experts.down_proj
        many, width = down.shape[:2]
        generator = torch.Generator(down.device).manual_seed(0)
        chosen = min(many, 8)
        most = 48 * many // chosen + _LARGE_BATCH
        scores = torch.randn((most, many), generator=generator, device=down.device)
        hidden = torch.randn((len(scores), width), generator=generator, device=down.device).to(down.dtype)
        weights, index = scores.softmax(-1).to(down.dtype).topk(chosen)
        whole = capturable_experts(experts, hidden, index, weights)
        for n in (*_BATCHES, most // 4, most // 2):
            if not torch.equal(capturable_experts(experts, hidden[:n], index[:n], weights[:n]), whole[:n]):
                raise UnsupportedModelError(
                    f"experts of {list(down.shape)} are not batch-invariant here; use another backend"
                )


@torch.inference_mode()
def self_test_head(head: Head | None, model: PreTrainedModel, tokenizer: Any, num_drafts: int) -> None:
    """Read a short text with the target and check the head's input convention on it, unless it has no check or K is 0.

    Raises:
        HeadLoadError: see `drafters.base.HasInputConvention`.
    """
    if isinstance(head, HasInputConvention) and num_drafts:
        head.check_convention(*read_text(model, tokenizer), num_drafts)


def read_text(model: PreTrainedModel, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """A short plain text: its token ids [T] int64 and the target's states after its final norm [T, H].

    Raises:
        InvalidInputError: the tokenizer makes ids that the model has no embedding for.
        UnsupportedModelError: the model does not return these states, see `decoder_of`.
    """
    (ids,) = encode_prompts(SELF_TEST_TEXT, tokenizer)
    rows = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    largest = max(ids[:_MOST_TOKENS])
    if largest >= rows:
        raise InvalidInputError(
            f"the tokenizer makes token id {largest}, but the model's embedding has {rows} rows: it does not belong to "
            "this model"
        )
    token_ids = torch.tensor(ids[:_MOST_TOKENS], device=model.device)
    decoder = decoder_of(model)
    width = model.config.get_text_config().hidden_size
    return token_ids, last_states(decoder, decoder(input_ids=token_ids[None], use_cache=False), width)[0]


def _error(ours: Tensor, right: Tensor) -> Tensor:
    """Rms error over rms of [T, V], the median of some 32 neighbouring tokens; the largest of these medians.

    So a flipped expert of one token does not count, and errors from some position on do. NaN where a token has NaN.
    """
    # A few tokens at a time: of all of them the numbers in double would take four times the logits' memory.
    pairs = zip(ours.split(_AT_A_TIME), right.split(_AT_A_TIME), strict=True)
    errors = torch.cat([relative_errors(*pair) for pair in pairs])
    return torch.stack([part.median() for part in errors.tensor_split(max(len(errors) // _NEIGHBOURS, 1))]).max()


def _room(target: Target) -> int:
    """Tokens of which the cache holds three rows, and that have places in a table of positions, if there is one."""
    tokens = (fewest_pages(target) - 1) // len(_PROMPT_LENS) * target.runner.page_size
    return min(tokens, target.max_positions or tokens)
