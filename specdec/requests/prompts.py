"""Prompts: text, ids, chat messages or tensors, turned into token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attention.errors import named_error
from specdec.errors import UNNAMED_ERRORS, InvalidInputError
from specdec.options.arguments import CHAT_OPTIONS, FIRST, RIGHT_CALLS, given_once, unexpected
from specdec.requests.chats import chat_ids, chat_text, num_characters, with_options
from specdec.values import Fields, IdSequence, Options, flag, is_whole, short, without_none

Prompts = Any
"""str | token ids | list of chat messages (dicts) | a list of any of these | tensor, array or BatchEncoding of ids."""

_KINDS = "a str, a list of token ids, a list of chat messages, or a list of these; or a tensor, array or BatchEncoding"
_MEDIA_TYPES = "mm_token_type_ids"
"""A processor's output beside the ids: 0 for text, others for images, videos and sound."""
_BESIDE_IDS = ("attention_mask", "token_type_ids", "special_tokens_mask", _MEDIA_TYPES)
"""Fields of a BatchEncoding next to its input_ids, also given as `generate(**inputs)`: the mask is read, the others
mean nothing to most causal models (for the rest see `submission`)."""
_MASK_HINT = (
    "padding is described by an attention_mask: give the tokenizer's whole BatchEncoding (or a dict of input_ids and "
    "attention_mask), or the rows without padding"
)


def prompts_of_call(prompts: Prompts, options: Options) -> Prompts:
    """The prompts of a call; what belongs to them is taken out of its options.

    chat: each text is a user's message. Options of the chat template go with each chat.

    Raises:
        InvalidInputError: prompts that are given twice or by another name, a mask without ids, or no chat where these
            need one.
    """
    elsewhere = {name: value for name, value in options.items() if RIGHT_CALLS.get(name) == FIRST}
    if prompts is None and elsewhere:
        raise unexpected("generate(prompts, {})", elsewhere, ())
    chat = flag("chat", options.pop("chat", False))
    for name in ("input_ids", "inputs"):
        prompts = given_once("prompts", prompts, name, options)
    beside = without_none({name: options.pop(name, None) for name in _BESIDE_IDS})
    if beside and (prompts is None or isinstance(prompts, (str, Mapping))):
        raise InvalidInputError(
            f"{', '.join(beside)}: it belongs to token ids that are given by themselves: generate(input_ids, "
            "attention_mask=mask), or all fields of a BatchEncoding: generate(**inputs)"
        )
    prompts = {"input_ids": prompts, **beside} if beside else prompts
    template = {name: options.pop(name) for name in CHAT_OPTIONS if name in options}
    if not chat and all(value is None for value in template.values()):
        return prompts
    found = split_prompts(prompts)
    if chat:
        found = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in found]
    if odd := [prompt for prompt in found if not _is_chat(prompt)][:1]:
        where = "chat=True" if chat else ", ".join(template)
        none = "neither text nor a list of chat messages" if chat else "no chat, so no chat template is used"
        raise InvalidInputError(f"{where}: {_shown(odd[0])} is {none}; leave {'chat' if chat else 'it'} out")
    return [with_options(prompt, template) for prompt in found]


def encode_prompts(prompts: Prompts, tokenizer: Any, most: int | None = None) -> list[list[int]]:
    """Token ids of every prompt. most: tokens beyond which a long text is refused without being tokenised whole.

    A str is tokenised as `tokenizer(text)` does; a list of {"role", "content"} messages goes through the chat template
    with a generation prompt; a list of int is taken as it is. An array or tensor of whole numbers is one prompt (1-D)
    or one a row (2-D). A BatchEncoding, or a dict with input_ids, is read with its attention_mask: padding on the left
    and on the right is left out.

    Raises:
        InvalidInputError: an empty prompt or a text that is too long, an unknown kind of prompt, messages without a
            chat template or that it refuses, a padded row without an attention_mask.
    """
    found = split_prompts(prompts)
    if most is None:
        return [_encode(prompt, tokenizer) for prompt in found]
    names = [f"prompt {place}: " if len(found) > 1 else "" for place in range(len(found))]
    for prompt, name in zip(found, names, strict=True):
        _check_length(prompt, tokenizer, most, name)
    each = []
    for prompt, name in zip(found, names, strict=True):
        each.append(_encode(prompt, tokenizer))
        check_num_tokens(len(each[-1]), most, name)  # before the next is read
    return each


def check_num_tokens(count: int, most: int, before: str = "", after: str = "") -> None:
    """Raises InvalidInputError: a prompt of so many tokens is too long. most: max_model_len. before, after: words."""
    if count >= most:
        raise InvalidInputError(
            f"{before}the prompt has {count} tokens{after}; with max_model_len={most} at most {most - 1} are allowed "
            "(one place is kept for a new token)"
        )


_LETTERS = 8
_SPARE = 64
"""Characters of a text that are tokenised for each token that is allowed; tokens by which the end of such a part may
differ from the whole text's."""


def _check_length(prompt: Any, tokenizer: Any, most: int, name: str) -> None:
    """Raises InvalidInputError: the beginning of a text, or of a chat in its template, has too many tokens; or a list
    of ids, of which only the first is read: a million of them would hold up all other threads."""
    if _begins_with_an_id(prompt):
        check_num_tokens(len(prompt), most, name)
    if not isinstance(prompt, str) and (not _is_chat(prompt) or num_characters(prompt) <= _LETTERS * most):
        return
    text = prompt if isinstance(prompt, str) else chat_text(prompt, tokenizer)
    part = text[: _LETTERS * most]
    if len(part) == len(text):
        return
    if (count := len(_tokenised(part, tokenizer))) > most + _SPARE:
        check_num_tokens(count, most, after=f" in its first {len(part)} of {len(text)} characters")


def split_prompts(prompts: Prompts) -> list[Any]:
    """One prompt or many -> a list of prompts; of an empty list or an array of no rows an empty one.

    Raises:
        InvalidInputError: the value is no prompt.
    """
    if isinstance(prompts, Mapping):
        return list(_batch_rows(prompts))
    if _is_array(prompts):
        return _rows("prompts", prompts)
    if isinstance(prompts, (list, tuple)) and not prompts:
        return []
    if isinstance(prompts, str) or _begins_with_an_id(prompts) or _is_chat(prompts):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"{short(prompts)} is {type(prompts).__name__}, not text: decode it to a str")
    if not isinstance(prompts, Sequence):
        lazily = " (an iterator is read by generate_iter)" if isinstance(prompts, Iterator) else ""
        raise InvalidInputError(f"no prompts in {_shown(prompts)}; give {_KINDS}{lazily}")
    _check_not_mixed(prompts)
    return list(prompts)


def _check_not_mixed(prompts: Sequence[Any]) -> None:
    """Refuse a list of token ids in which something is none, by what that is: no list of prompts has ids in it."""
    odd = [item for item in prompts if not is_whole(item)]
    if len(odd) < len(prompts) and not any(
        isinstance(item, (str, Sequence, Mapping)) or _is_array(item) for item in odd
    ):
        place = next(i for i, item in enumerate(prompts) if not is_whole(item))
        raise InvalidInputError(
            f"a prompt of token ids has {_shown(odd[0])} ({type(odd[0]).__name__}) at index {place}, which is no whole "
            f"number; a prompt is {_KINDS}"
        )


def ids_within(given: Any, size: int) -> list[int]:
    """Token ids of `own_logits`, given as a list or a 1-D array, all of them below `size`.

    Raises:
        InvalidInputError: no ids, ids that are no integers, or an id outside of 0 … size - 1; an array of something
            else, or whose values cannot be read.
    """
    found = _array(given) if _is_array(given) else given
    ids = _ids_of(found)
    if not ids or not all(0 <= token < size for token in ids):
        raise InvalidInputError(
            f"own_logits: give at least one token id, all in 0 … {size - 1}: one sequence of integers, not text"
        )
    return ids


class _Masked(list[int]):
    """Token ids without padding, by their attention_mask: every one is read."""


def _encode(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return _tokenised(prompt, tokenizer)
    if isinstance(prompt, _Masked):
        return list(prompt)
    if isinstance(prompt, Mapping) and "input_ids" not in prompt:
        raise InvalidInputError(f"{_shown(prompt)} is one chat message; a chat is a list of messages")
    if isinstance(prompt, Mapping) or _is_array(prompt):
        rows = split_prompts(prompt)
        if len(rows) != 1:
            raise InvalidInputError(f"a prompt in a list has one row, not {len(rows)}; give the batch by itself")
        return _encode(rows[0], tokenizer)
    if (ids := _ids_of(prompt)) is not None:
        _check_padding(ids, tokenizer)
        return ids
    if _is_chat(prompt):
        return chat_ids(prompt, tokenizer)
    if _is_listed(prompt):
        _check_not_mixed(prompt)
    raise InvalidInputError(f"a prompt is {_KINDS}, not {type(prompt).__name__}: {_shown(prompt)}")


def _tokenised(text: str, tokenizer: Any) -> list[int]:
    if not text:
        raise InvalidInputError("the prompt is empty; at least one token is needed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the prompt {short(text)} is not valid Unicode: {error.reason}") from error
    try:
        return list(tokenizer(text)["input_ids"])
    except UNNAMED_ERRORS as error:
        raise InvalidInputError(
            f"the tokenizer cannot encode the prompt {short(text)}: {named_error(error)}"
        ) from error


def _check_padding(ids: IdSequence, tokenizer: Any) -> None:
    """Refuse ids that begin or end with the pad id: most likely padding, which without a mask is read as text."""
    pad = getattr(tokenizer, "pad_token_id", None)
    own = {getattr(tokenizer, name, None) for name in ("eos_token_id", "bos_token_id")}
    # Many tokenizers pad with eos or bos, which may well begin or end a prompt that has no padding.
    if not ids or pad is None or pad in own or pad not in (ids[0], ids[-1]):
        return
    raise InvalidInputError(
        f"a prompt of {len(ids)} token ids begins or ends with the tokenizer's pad id {pad}, which would be read as "
        f"text; {_MASK_HINT}. Where the token is meant as text, give an attention_mask of ones"
    )


def _batch_rows(batch: Fields) -> Sequence[list[int]]:
    """Rows of a BatchEncoding, or of a mapping like it, without padding."""
    if "input_ids" not in batch:
        raise InvalidInputError(f"{_shown(batch)} has no input_ids; a chat message goes in a list; give {_KINDS}")
    if odd := sorted(str(key) for key in batch if key not in {*_BESIDE_IDS, "input_ids", "length"}):
        raise InvalidInputError(
            f"a prompt has input_ids and attention_mask (only text is served); not supported next to them: "
            f"{', '.join(odd)}"
        )
    if _MEDIA_TYPES in batch and any(map(any, _rows(_MEDIA_TYPES, batch[_MEDIA_TYPES]))):
        raise InvalidInputError(
            f"{_MEDIA_TYPES} says that the prompt has an image, a video or sound in it; only text is served"
        )
    ids = _rows("input_ids", batch["input_ids"])
    if (mask := batch.get("attention_mask")) is None:
        return ids
    masks = _rows("attention_mask", mask)
    if list(map(len, ids)) != list(map(len, masks)):
        raise InvalidInputError("attention_mask and input_ids have different shapes")
    return [_unpadded(row, own) for row, own in zip(ids, masks, strict=True)]


def _rows(name: str, given: Any) -> list[list[int]]:
    if _is_array(given):
        found = _array(given)
        return found if given.ndim == 2 else [found]
    if (ids := _ids_of(given)) is not None:
        return [ids]
    if isinstance(given, Sequence):
        rows: list[Any] = [_array(row) if _is_array(row) else _ids_of(row) for row in given]
        if None not in rows:
            return rows
    raise InvalidInputError(f"{name} is a list of whole numbers or a list of such lists, not {_shown(given)}")


def _unpadded(ids: IdSequence, mask: Sequence[int]) -> _Masked:
    """The ids under the ones of their mask, which must be in one piece."""
    if odd := sorted(set(mask) - {0, 1}):
        raise InvalidInputError(f"attention_mask has {odd[0]}: allowed are 0 and 1")
    kept = [t for t, on in zip(ids, mask, strict=True) if on]
    first = list(mask).index(1) if kept else 0
    if not all(mask[first : first + len(kept)]):
        raise InvalidInputError(
            "attention_mask has zeros between ones: only padding on the left and on the right can be left out"
        )
    return _Masked(kept)


def _is_array(value: Any) -> bool:
    """A tensor or array (torch, numpy, jax); no scalar type of theirs."""
    if getattr(value, "is_nested", False):  # whose shape raises
        return True
    return hasattr(value, "ndim") and hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "tolist")


_NO_TABLES = {
    "is_meta": "lies on device 'meta' and has no values",
    "is_nested": "is nested; give a list of its rows, such as [row.tolist() for row in tensor.unbind()]",
    "is_quantized": "is quantised; give it dense and of whole numbers",
    "is_sparse": "is sparse; give it dense and of whole numbers",
    "is_sparse_csr": "is sparse; give it dense and of whole numbers",
}
"""Attributes of tensors that cannot be read as a table of numbers, and what to do with them."""


def _array(value: Any) -> Any:
    """A 1-D or 2-D array of whole numbers as lists."""
    of = f"{type(value).__name__} of {value.dtype}"
    if odd := [words for name, words in _NO_TABLES.items() if getattr(value, name, False)]:
        raise InvalidInputError(f"a tensor of token ids ({of}) {odd[0]}")
    kind = getattr(value.dtype, "kind", None)  # of numpy's dtypes; torch's and jax's have it in their names
    is_of_integers = kind in ("i", "u") if isinstance(kind, str) else "int" in str(value.dtype)
    if value.ndim not in (1, 2) or not is_of_integers:
        raise InvalidInputError(
            f"a prompt is a 1-D or 2-D array of whole numbers, not {of} and shape {tuple(value.shape)}; give lists of "
            "token ids, such as those of .tolist()"
        )
    try:
        return value.tolist()
    except UNNAMED_ERRORS as error:
        raise InvalidInputError(
            f"the values of a {type(value).__name__} of token ids cannot be read: {named_error(error)}"
        ) from error


def _ids_of(prompt: Any) -> list[int] | None:
    """A sequence of whole numbers as a list of ints; None of anything else."""
    if type(prompt) is list and set(map(type, prompt)) == {int}:  # as most are: seen in a tenth of the time
        return list(prompt)
    if not _is_listed(prompt) or not all(map(is_whole, prompt)):
        return None
    return [operator.index(token) for token in prompt]


def _begins_with_an_id(prompt: Any) -> bool:
    """Whether it is a list of ids, or of no prompt."""
    return _is_listed(prompt) and len(prompt) > 0 and is_whole(prompt[0])


def _is_listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_chat(prompt: Any) -> bool:
    return (
        _is_listed(prompt)
        and len(prompt) > 0
        and all(isinstance(m, dict) and "input_ids" not in m for m in prompt)  # those would be several prompts
    )


def _shown(value: Any) -> str:
    """A short description of a value for messages."""
    if hasattr(value, "tolist"):
        return f"{type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))} (give its .tolist())"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {short(sorted(map(str, value)))}"
    return short(value)
