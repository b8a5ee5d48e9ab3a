"""AnswerReader: reasoning, content and tool calls of a completion as its tokens come; in OpenAI's form.

Each character of an answer is part of the reasoning, of the content, of a call's name or arguments, or of a marker. The
parts are the same however the answer was divided.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import regex

from specdec.extensions.tools.answer_formats import AnswerFormat, Opening, Where, format_of
from specdec.extensions.tools.tool_use import ToolUse
from specdec.requests.request import Completion
from specdec.requests.text import TextStream, Vocabulary
from specdec.values import Fields, IdSequence, Json, without

_PROMPT_END = 64
"""Tokens of a prompt in which the marker that opens reasoning may be, with white space."""
_FIELDS = {"content": "content", "reasoning": "reasoning_content"}
Kind = Literal["content", "reasoning", "call", "arguments"]
_PLAIN = regex.compile(r'[^"\\\n]+')


class AnswerPart(NamedTuple):
    """A piece of an answer. text: of a "call" the tool's name. call: the number of the call. id: its own, or ""."""

    kind: Kind
    text: str
    call: int = 0
    id: str = ""


class AnswerParser:
    """Reads the text of one answer.

    White space at the borders of reasoning and calls is left out, as templates write it there.
    """

    def __init__(self, own: AnswerFormat, prompt_end: str = "", reads_calls: bool = True, name: str = "") -> None:
        """prompt_end: the last characters of the prompt, which may open the reasoning. reads_calls: False where the
        request has no tools, so that markers of calls are text. name: of the tool that calls without a name call."""
        kinds = ("reasoning", "skip", *(("call", "object") if reads_calls else ()))
        self._format = own
        self._name = name
        self._openings = [opening for opening in own.openings if opening.kind in kinds]
        self._text = ""
        self._at = 0
        self._where: Where = "start"
        self._open: Opening | None = None
        self._space = ""
        self._trims = False
        self._num_calls = 0
        self._parts: list[AnswerPart] = []
        self._begun = ""
        begin, end = own.reasoning
        if begin and prompt_end.rstrip().endswith(begin):
            self._enter(Opening("reasoning", "", regex.escape(end)))
        elif end and prompt_end.rstrip().endswith(end):
            self._where = "thought"

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that have become certain with more text."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._read(final=False)

    def finish(self) -> list[AnswerPart]:
        """The parts that are left at the answer's end."""
        parts = self._read(final=True)
        if self._space and self._where != "after" and not self._trims and self._open is None:
            parts.append(AnswerPart("content", self._space))
        return parts

    def _read(self, final: bool) -> list[AnswerPart]:
        while self._at < len(self._text) or (final and self._open is not None):
            step = self._outside if self._open is None else self._within
            if not step(final):
                break
        parts = self._parts
        self._parts = []
        return parts

    def _outside(self, final: bool) -> bool:
        """Read on to a marker. False: more text is needed."""
        head = self._format.head.search(self._text, self._at, partial=not final)
        if head is None:
            self._say("content", len(self._text))
            return True
        self._say("content", head.start())
        if head.partial:
            return False
        for opening in self._openings:
            if self._where not in opening.where:
                continue
            found = opening.opens.match(self._text, self._at, partial=not final)
            if found is None:
                continue
            if found.partial:
                return False
            self._at = found.end()
            if opening.kind == "call":
                groups = found.groupdict()
                self._begin_call(groups["name"] or self._name, groups.get("id") or "")
            if opening.kind != "skip":
                self._begun = self._space + found.group()
                self._enter(opening)
            return True
        self._say("content", self._at + 1)
        return True

    def _begin_call(self, name: str, call_id: str = "") -> None:
        self._parts.append(AnswerPart("call", name, self._num_calls, call_id))
        self._num_calls += 1
        self._where = "after"

    def _enter(self, opening: Opening) -> None:
        self._open = opening
        self._space = ""
        self._trims = True
        self._body = ""
        self._in_string = False
        self._escaped = False
        self._depth = 0

    def _within(self, final: bool) -> bool:
        opening = self._open
        assert opening is not None
        if opening.kind == "reasoning":
            close = opening.closes.search(self._text, self._at, partial=not final)
            self._say("reasoning", len(self._text) if close is None else close.start())
        else:
            close = self._close_of_call(opening)
        if not final and (close is None or close.partial):
            return False
        # Reasoning or a call has ended, by its close or with the answer.
        if opening.kind == "object":
            self._end_object(close)
        elif opening.kind == "call":
            self._mend(close)
        elif self._where == "start":
            self._where = "thought"
        self._at = len(self._text) if close is None or close.partial else close.end()
        self._open = None
        self._space = ""
        self._trims = True
        return True

    def _close_of_call(self, opening: Opening) -> Any:
        """Read arguments up to where the call ends; the match of its close, a partial one, or None at the end."""
        begin = self._at
        at = self._at
        close = None
        while at < len(self._text):
            if self._in_string:
                at = self._in_a_string(at)
                continue
            if not opening.balanced or self._depth <= 0:
                close = opening.closes.match(self._text, at, partial=True)
                if close is not None:
                    break
            letter = self._text[at]
            self._in_string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            at += 1
        self._at = at
        new = self._text[begin:at]
        new = new if self._body or opening.kind == "object" else new.lstrip()
        self._body += new
        if opening.kind == "call" and new:
            self._parts.append(AnswerPart("arguments", new, self._num_calls - 1))
        return close

    def _in_a_string(self, at: int) -> int:
        """Past a piece of a JSON string. A line's end ends it: JSON has none there, so that a quote was forgotten."""
        if not self._escaped and (plain := _PLAIN.match(self._text, at)) is not None:
            return int(plain.end())
        letter = self._text[at]
        if letter == "\n" and not self._escaped:
            self._in_string = False
            return at
        self._in_string = self._escaped or letter != '"'
        self._escaped = letter == "\\" and not self._escaped
        return at + 1

    def _mend(self, close: Any) -> None:
        """Give a call back what its close has taken: the last bracket where the object around it was not closed, and
        all of a close that is not complete, unless the arguments are."""
        if close is None or _is_json(self._body):
            return
        taken = self._text[close.start() :] if close.partial else close.group().strip()[:1]
        if taken and (close.partial or (taken == "}" and _is_json(self._body + taken))):
            self._parts.append(AnswerPart("arguments", taken, self._num_calls - 1))

    def _end_object(self, close: Any) -> None:
        """An object with name and arguments in another order is a call; what is none is content as it was written."""
        try:
            found = json.loads(self._body)
            name = found["name"]
            given = found.get("arguments", found.get("parameters", {}))
        except (LookupError, TypeError, ValueError, RecursionError):
            name = None
        if close is None or close.partial or not isinstance(name, str):
            written = self._begun + self._body + ("" if close is None else self._text[close.start() : close.end()])
            self._parts.append(AnswerPart("content", written))
            self._where = "content"
            return
        self._begin_call(name, str(found.get("id", "")))
        self._parts.append(AnswerPart("arguments", _arguments(given), self._num_calls - 1))

    def _say(self, kind: Kind, end: int) -> None:
        """Content or reasoning up to `end`; white space at its end waits for what comes next."""
        text = self._space + self._text[self._at : end]
        self._at = end
        text = text.lstrip() if self._trims else text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._trims = False
            self._parts.append(AnswerPart(kind, kept))
            if kind == "content":
                self._where = "content"


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _WithMarkers(Vocabulary):
    """A vocabulary whose text has those special tokens that are markers."""

    def __init__(self, tokenizer: Any, markers: Sequence[str]) -> None:
        super().__init__(tokenizer)
        self._plain = Vocabulary(tokenizer)
        self._markers = frozenset(markers)

    def decode(self, token_ids: list[int], special: bool = False) -> str:
        if not special:
            each = ((token_id, self._plain.spelling(token_id).special) for token_id in token_ids)
            token_ids = [token_id for token_id, text in each if text is None or text in self._markers]
        return self._plain.decode(token_ids, special=True)


class AnswerReader:
    """Reads one completion, whose tokens come in any number of pieces."""

    def __init__(self, use: ToolUse, tokenizer: Any, prompt_ids: IdSequence, stops: Sequence[str] = ()) -> None:
        """prompt_ids: of the prompt, or its last ones. stops: stop strings of the request, which are cut off."""
        assert use.format is not None
        self._vocabulary = _WithMarkers(tokenizer, use.format.special)
        end = self._vocabulary.decode([*prompt_ids[-_PROMPT_END:]])
        self._parser = AnswerParser(use.format, end, use.reads_calls, use.name)
        self._stream = TextStream(self._vocabulary, stops)
        self._one = use.one
        self._ids: list[int] = []
        self.num_calls = 0

    def read(self, token_ids: IdSequence, last: bool) -> list[AnswerPart]:
        """The parts that have become certain with these tokens. last: there are no more."""
        self._ids += token_ids
        self._stream.push(self._ids, len(self._ids))
        if last:
            parts = self._parser.feed(self._stream.finish(self._ids)[1]) + self._parser.finish()
        else:
            parts = self._parser.feed(self._stream.show())
        self.num_calls += sum(part.kind == "call" for part in parts)
        if self._one:
            self.num_calls = min(self.num_calls, 1)
            parts = [part for part in parts if not part.call]
        return parts


def deltas(parts: Iterable[AnswerPart]) -> list[Json]:
    """The parts as `delta`s of a stream in OpenAI's form."""
    found = list[Json]()
    for part in parts:
        if part.kind in _FIELDS:
            found.append({_FIELDS[part.kind]: part.text})
        elif part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            call_id = part.id or uuid.uuid4().hex[:9]  # Mistral's templates take ids of nine letters only
            call = {"index": part.call, "id": call_id, "type": "function", "function": function}
            found.append({"tool_calls": [call]})
        else:
            found.append({"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]})
    return found


def message_of(parts: Iterable[AnswerPart]) -> Json:
    """The parts as an assistant's `message` in OpenAI's form; content is None where there are calls alone."""
    texts = dict[str, str]()
    calls = []
    for delta in deltas(parts):
        for name, value in delta.items():
            if name != "tool_calls":
                texts[name] = texts.get(name, "") + value
            elif "id" in value[0]:
                calls.append(without(value[0], ("index",)))
            else:
                calls[value[0]["index"]]["function"]["arguments"] += value[0]["function"]["arguments"]
    content = texts.pop("content", None if calls else "")
    return {"role": "assistant", "content": content, **texts, **({"tool_calls": calls} if calls else {})}


def answer_of(completion: Completion, tokenizer: Any, family: str = "auto", stops: Sequence[str] = ()) -> Json:
    """A completion as a message with `content`, `reasoning_content` and `tool_calls`, which a chat goes on with.

    Args:
        family: a name of `FORMATS`; "auto": as the tokenizer's chat template shows, or else its `response_template`.
        stops: stop strings of the request.

    Raises:
        InvalidInputError: another name.
    """
    own = format_of(family, getattr(tokenizer, "chat_template", None))
    if own is None:
        found = _by_response_template(completion, tokenizer, stops)
        return found or {"role": "assistant", "content": completion.text}
    reader = AnswerReader(ToolUse(format=own, reads_calls=True), tokenizer, completion.prompt_token_ids, stops)
    return message_of(reader.read(completion.token_ids, last=True))


def _by_response_template(completion: Completion, tokenizer: Any, stops: Sequence[str]) -> Json | None:
    """The message as transformers parses it; None: the tokenizer has no template, or the answer is not of its form.

    Source: huggingface/transformers, utils/chat_parsing/response_parser.py.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return None
    text = str(tokenizer.decode(completion.token_ids))
    for stop in stops:
        text = text.partition(stop)[0]
    try:
        return message_of(_parts_of(tokenizer.parse_response(text, prefix=completion.prompt_token_ids)))
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _parts_of(message: Fields) -> Iterator[AnswerPart]:
    if thought := message.get("reasoning_content") or message.get("thinking"):
        yield AnswerPart("reasoning", thought)
    if text := message.get("content"):
        yield AnswerPart("content", text)
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield AnswerPart("call", function["name"], place)
        yield AnswerPart("arguments", _arguments(function["arguments"]), place)
