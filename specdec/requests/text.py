"""TextStream: the text of a growing sequence of tokens, and the place where a stop string ends it.

A request ends with the first token after which its text contains a stop string. Its text after n tokens is
`tokenizer.decode(first n tokens, skip_special_tokens=True)` without U+FFFD at the end (a character that is not finished
yet). A stop string may also contain special tokens: it is looked for in the same text with every special token written
out at its place. Both are looked at token by token, so that the place does not depend on how many tokens a round
brings.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers.convert_slow_tokenizer import bytes_to_unicode

from attention.cached import cached_property
from attention.errors import named_error
from specdec.errors import InvalidInputError
from specdec.values import IdSequence

UNFINISHED = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW = 16
"""Tokens after which the window moves on."""
_LONG_WINDOW = 4 * _WINDOW
_SETTLING = 8
"""Tokens (of at least a byte each) after which text that still looks unfinished has become final: UTF-8 needs 4."""
_CLEANING = 4
"""Longest of the patterns that clean_up_tokenization_spaces replaces (" n't"), in characters."""
_CLEANED = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're"

_UNDECODABLE = (IndexError, KeyError, TypeError, OverflowError)
"""Exceptions of tokenizers for unknown ids: from a table, a dictionary, joining None, Rust."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True)
class Spelling:
    """How one token is written.

    Attributes:
        special: the written form of a special token, which leaves no text; None for others.
        byte: of a byte token.
    """

    special: str | None
    byte: int | None


_written: weakref.WeakKeyDictionary[Any, dict[tuple[int, bool], tuple[bytes, bool]]] = weakref.WeakKeyDictionary()
"""What `Vocabulary.written` has found, by tokenizer: a service reads it for 20 alternatives of every token."""


class Vocabulary:
    """A tokenizer, and the spellings of tokens, cached."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, Spelling] = {}
        try:
            self._written = _written.setdefault(tokenizer, {})
        except TypeError:  # it cannot be referred to weakly
            self._written = {}

    def decode(self, token_ids: list[int], special: bool = False) -> str:
        """The text of these tokens, without special tokens or with them.

        Raises:
            InvalidInputError: the tokenizer cannot decode them; the message names the first such id. A model may
                generate more tokens than its tokenizer has, where its vocabulary is padded.
        """
        try:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=not special))
        except _UNDECODABLE as error:
            bad = next((t for t in token_ids if not self._decodes(t)), None)
            which = f"token ids {token_ids}" if bad is None else f"token id {bad}, which the model generated"
            raise InvalidInputError(
                f"the tokenizer cannot decode {which} ({named_error(error)}): does it belong to this model?"
            ) from error

    def _decodes(self, token_id: int) -> bool:
        try:
            self.tokenizer.decode([token_id], skip_special_tokens=False)
        except _UNDECODABLE:
            return False
        return True

    def spelling(self, token_id: int) -> Spelling:
        """How a token is written."""
        found = self._known.get(token_id)
        if found is not None:
            return found
        text = self.decode([token_id])
        shown = self.decode([token_id], special=True)
        special = shown if text != shown else None
        byte = None
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        if special is None and convert is not None:
            name = convert(token_id)
            if name is None:  # a place of the model's vocabulary that the tokenizer does not use
                special = ""
            elif name != text and (match := _BYTE.fullmatch(name)):
                byte = int(match[1], 16)
        self._known[token_id] = Spelling(special, byte)
        return self._known[token_id]

    def written(self, token_id: int, first: bool = False) -> tuple[bytes, bool]:
        """The bytes of a token, and whether it leaves no text: a special one, and an id without a token.

        Bytes are those of its text behind other tokens, or `first`, where some decoders drop a space. A token that is
        part of a character has that part; a special token is written out.
        """
        key = token_id, first
        if (found := self._written.get(key)) is not None:
            return found
        try:
            special = self.spelling(token_id).special
            own = self._bytes_of(token_id, first) if special is None else special.encode("utf-8", "replace")
        except InvalidInputError:  # an alternative may be an id of the model that the tokenizer does not have
            return b"", True
        if own:
            self._written[key] = own, special is not None
        return own, special is not None

    def _bytes_of(self, token_id: int, first: bool) -> bytes:
        text = self.decode([token_id])
        byte = self.spelling(token_id).byte
        if UNFINISHED in text:
            convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
            found = bytes([byte]) if byte is not None else _byte_level(convert(token_id) if convert else None)
            if found is not None and found.decode("utf-8", "replace") == text:
                return found
        twice = text * 2 if first else self.decode([token_id, token_id])
        return (twice[len(text) :] if twice.startswith(text) else text).encode("utf-8", "replace")

    @cached_property
    def cleans(self) -> bool:
        """Whether `decode` takes out spaces before punctuation.

        transformers does not for every kind of tokenizer for which `clean_up_tokenization_spaces` is set.
        """
        if not getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return False
        ids = list(self.tokenizer.encode(_CLEANED, add_special_tokens=False))
        plain = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return bool(plain != self.decode(ids))


_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""How byte-level tokenizers write bytes."""


def _byte_level(written: str | None) -> bytes | None:
    """The bytes of a token as byte-level tokenizers write it; None where it is not written so."""
    found = [_BYTE_OF.get(letter) for letter in written or ""]
    return None if None in found else bytes(byte for byte in found if byte is not None)


class Detokenizer:
    """The text of a growing sequence of tokens.

    Attributes:
        start: characters before `tail`; they are final.
        tail: the text from there on, as of the last `push`; in a run of byte tokens, its complete characters.
        stable: characters of `tail` that no later token can change.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []  # those that leave text; all places below are places in it
        self._context = 0
        self._context_text = ""
        self._mark = 0  # the window is [mark, …), decoded after [context, mark)
        self._cut = 0  # where the window may move to
        self._cut_text = 0  # characters of `tail` before `_cut`
        self._decoded = 0
        self._run: bytes | None = None  # successive byte tokens
        self._before = self._first = ""  # text before the run; its first character
        self.start = 0
        self.tail = ""
        self.stable = 0

    def _move_on(self) -> str:
        """Move the window on; return the text that left `tail`."""
        context_text = self._vocabulary.decode(self._ids[self._mark : self._cut])
        if not context_text:  # a context without text: a decoder that drops the first space would drop the next one
            return ""
        passed = self.tail[: self._cut_text]
        self._context = self._mark
        self._mark = self._cut
        self._context_text = context_text
        self.start += len(passed)
        self.tail = self.tail[len(passed) :]
        self.stable = max(self.stable - len(passed), 0)
        self._cut_text = 0
        return passed

    def push(self, token_ids: IdSequence) -> str:
        """Read the next tokens; return the text that left `tail` before them, because the window had become long."""
        passed = self._move_on() if self._run is None and self._cut - self._mark >= _WINDOW else ""
        for token_id in token_ids:
            spelling = self._vocabulary.spelling(token_id)
            if spelling.special is not None:
                continue
            if spelling.byte is None:
                self._run = None
            elif self._run is None:
                self._decode()
                self._run = b""
                self._before = self.tail
            self._ids.append(token_id)
            if self._run is not None and spelling.byte is not None:
                self._run += bytes([spelling.byte])
                self._decode_run(self._run)
        if self._run is None:
            self._decode()
        return passed

    def _decode_run(self, run: bytes) -> None:
        """`tail` with a run of byte tokens while these are valid UTF-8 as a whole, else without them."""
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = ""
        if len(text) == 1:  # as the tokenizer decodes it: at the very start, a space may be dropped
            self._first = self._text(len(self._ids))[len(self._before) :]
        self.tail = self._before + (self._first + text[1:] if text else "")

    def _decode(self) -> None:
        num = len(self._ids)
        if num == self._decoded:
            return
        self._decoded = num
        self.tail = self._text(num)
        finished = len(self.tail.rstrip(UNFINISHED))
        self.stable = max(0, min(finished, len(self.tail) - _CLEANING * self._vocabulary.cleans))
        if self.stable == len(self.tail):
            self._cut = num
            self._cut_text = len(self.tail)
        elif num - self._mark >= _LONG_WINDOW:
            # The text has looked unfinished for long: beyond `_SETTLING` tokens back it no longer changes.
            cut = num - _SETTLING
            text = self._text(cut)
            if self.tail.startswith(text):
                self._cut = cut
                self._cut_text = len(text)
                self.stable = max(self.stable, len(text))

    def _text(self, num: int) -> str:
        """The text of the first `num` tokens from `start` on."""
        whole = self._vocabulary.decode(self._ids[self._context : num])
        if whole.startswith(self._context_text):
            return whole[len(self._context_text) :]
        return self._vocabulary.decode(self._ids[:num])[self.start :]


__all__ = ["TextStream", "Tokenizer", "Vocabulary"]


class TextStream:
    """The text of one request. Shown text is final and never goes beyond the text that the request ends with.

    num_shown: characters shown so far.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stops = tuple(stops)
        self._start()

    def _start(self) -> None:
        self._detokenizer = Detokenizer(self._vocabulary)
        self._known = 0
        self.num_shown = 0
        self._unsent = ""  # final text after them that the detokenizer has left behind
        self._specials: list[tuple[int, str]] = []  # (characters before it, as it is written) of each special token
        self._cut: int | None = None

    def rewind(self, token_ids: IdSequence, num_shown: int) -> None:
        """Back to where only these new tokens were read, and `num_shown` characters of their text shown."""
        self._start()
        self.push(token_ids, len(token_ids))
        self._mark_shown(num_shown)

    def push(self, token_ids: IdSequence, num: int) -> int | None:
        """Read on to the first `num` of the request's new tokens.

        Returns:
            With how many tokens the request ends, where a stop string is complete; else None.
        """
        for n in range(self._known + 1, num + 1) if self._stops else (num,):  # one by one, or all at once
            special = self._vocabulary.spelling(token_ids[n - 1]).special if self._stops else None
            if special:
                self._specials.append((self.num_shown + len(self._text().rstrip(UNFINISHED)), special))
            passed = self._detokenizer.push(token_ids[self._known : n])
            self._unsent += passed[max(self.num_shown - (self._detokenizer.start - len(passed)), 0) :]
            self._known = n
            self._cut = self._find() if self._stops else None
            if self._cut is not None:
                return n
        return None

    def show(self) -> str:
        """Text that has become certain since the last call: complete characters, no part of a stop string."""
        final = self._detokenizer.start + self._detokenizer.stable - self.num_shown
        text = self._text()[: max(final, 0)]
        if self._stops:
            text = text[: self._held_from(text)]
        self._mark_shown(len(text))
        return text

    def _mark_shown(self, count: int) -> None:
        self.num_shown += count
        self._unsent = self._unsent[count:]
        if self._specials:
            self._specials = [(at, special) for at, special in self._specials if at >= self.num_shown]

    def finish(self, token_ids: IdSequence) -> tuple[str, str]:
        """The whole text of a request that ended with these new tokens, and the part that was not shown yet."""
        text = self._vocabulary.decode(list(token_ids))[: self._cut]
        return text, text[self.num_shown :]

    def _text(self) -> str:
        """The text that is not shown yet."""
        return self._unsent + self._detokenizer.tail[max(self.num_shown - self._detokenizer.start, 0) :]

    def _find(self) -> int | None:
        """Number of characters before the first stop string, if there is one."""
        forms = self._forms(self._text().rstrip(UNFINISHED))
        found = [at[place] for form, at in forms for stop in self._stops if (place := form.find(stop)) >= 0]
        return self.num_shown + min(found) if found else None

    def _held_from(self, text: str) -> int:
        """Where the longest end of `text` begins that may become a stop string."""
        return min(at[_held_from(form, stop)] for form, at in self._forms(text) for stop in self._stops)

    def _forms(self, text: str) -> list[tuple[str, Sequence[int]]]:
        """`text`, and with the special tokens in it written out; for each of their places the place in `text`."""
        plain: tuple[str, Sequence[int]] = text, range(len(text) + 1)
        if not self._specials:
            return [plain]
        pieces = []
        places = []
        done = 0
        for at, special in self._specials:
            place = at - self.num_shown
            if place > len(text):
                break
            place = max(place, done)
            pieces += [text[done:place], special]
            places += [*range(done, place), *[place] * len(special)]
            done = place
        return [plain, ("".join([*pieces, text[done:]]), [*places, *range(done, len(text) + 1)])]


def _held_from(text: str, stop: str) -> int:
    r"""Where the longest end of `text` begins that is a beginning of `stop`, but not the whole; else its length.

    >>> _held_from("the answer\n", "\nQ:")
    10
    """
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
