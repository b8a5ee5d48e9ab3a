"""Grammar: what the new tokens of a request must spell, as the user writes it. See `specdec.extensions.grammars`.

Source: OpenAI API reference, "response_format"; guidance-ai/llguidance, docs/syntax.md (Lark) and docs/json_schema.md;
vllm-project/vllm, vllm/sampling_params.py (structural_tag).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from specdec.errors import InvalidInputError
from specdec.options.logits_options import token_ids
from specdec.values import Fields, TokenIds, are_texts, refuse, short, wrong

Kind = Literal["json", "regex", "lark", "choice", "structural_tag"]
Marker = str | TokenIds
_GIVEN = (
    "a Grammar (Grammar.json, .regex, .lark, .choice, .structural_tag), a response_format of OpenAI's, or an object "
    "with fill, advance and rollback"
)


@runtime_checkable
class TokenMatcher(Protocol):
    """A grammar of the user's own, before the next token. It is copied for each request, by `fork` or deepcopy."""

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next: mask [W] int32, bit t % 32 of word t // 32 is token t. At the end of what
        it matches these are ids that end the request."""

    def advance(self, token_id: int) -> bool:
        """Take the next token; False, and nothing changes, where it may not come next."""

    def rollback(self, count: int) -> None:
        """Take back so many tokens."""


@dataclass(frozen=True)
class Grammar:
    """What new tokens must spell, by kind and source; made by the functions below.

    Attributes:
        kind: "json", "regex", "lark", "choice" or "structural_tag".
        source: the grammar; of a schema, of choices and of structural tags their JSON text.
        begin: the grammar begins after this text, or after these token ids, each time that they are generated; what
            comes before is free. None: with the first new token.
        end: this text, or these ids, must follow the grammar's end, and free text after them. None: the request ends
            with the grammar.
    """

    kind: Kind
    source: str
    begin: Marker | None = None
    end: Marker | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError: a kind that there is not, a source that is no text, a marker that is none."""
        if not isinstance(self.kind, str) or self.kind not in get_args(Kind) or not isinstance(self.source, str):
            raise InvalidInputError(f"Grammar({short(self.kind)}, {short(self.source)}): give {_GIVEN}")
        for name in ("begin", "end"):
            object.__setattr__(self, name, _marker(name, getattr(self, name)))  # frozen: the checked value
        if self.end is not None and self.begin is None:
            raise InvalidInputError(
                f"end={short(self.end)} without begin: what follows the end would be free; give both"
            )

    @classmethod
    def json(cls, schema: Any = None, *, begin: Any = None, end: Any = None) -> Grammar:
        """JSON that a schema allows: a dict, its text, or a pydantic model; None: any object. `begin`, `end`: see
        `Grammar`.

        White space between two parts is at most 8 characters, unless the schema's "x-guidance" changes that.

        Raises:
            InvalidInputError: it is none of these.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if schema is None:
            schema = {"type": "object"}
        try:
            own = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps({} if own is True else own)
        except (TypeError, ValueError, RecursionError) as error:
            raise wrong("schema", schema, f"it is no JSON ({error})") from None
        if not isinstance(own, dict) and own is not True:
            raise refuse("schema", schema, "a JSON schema: a dict, its text, or a pydantic model")
        return cls("json", text, begin, end)

    @classmethod
    def regex(cls, pattern: str, *, begin: Any = None, end: Any = None) -> Grammar:
        """Text that a regular expression `pattern` matches as a whole: of the Rust crate regex, so without look-around.
        `begin` and `end`: see `Grammar`."""
        return cls("regex", pattern, begin, end)

    @classmethod
    def lark(cls, source: str, *, begin: Any = None, end: Any = None) -> Grammar:
        """Text of a context-free grammar (`source`) in Lark's syntax, of its rule `start`. `begin`, `end`: see
        `Grammar`."""
        return cls("lark", source, begin, end)

    @classmethod
    def choice(cls, texts: Iterable[str], *, begin: Any = None, end: Any = None) -> Grammar:
        """One of these texts. `begin`, `end`: see `Grammar`.

        Raises:
            InvalidInputError: none, or something that is no text.
        """
        if not isinstance(texts, Iterable):
            raise refuse("texts", texts, "one or more strings, none of them empty")
        each = [texts] if isinstance(texts, str) else list(texts)
        if not each or not are_texts(each):
            raise refuse("texts", texts, "one or more strings, none of them empty")
        return cls("choice", json.dumps(each), begin, end)

    @classmethod
    def structural_tag(cls, structures: Sequence[Fields], triggers: Sequence[str]) -> Grammar:
        """Free text in which, after a trigger, one of these structures must follow.

        structures: each with "begin", "schema" (of JSON) and "end". triggers: texts with which some "begin" starts.

        Raises:
            InvalidInputError: a structure without these, or whose "begin" starts with no trigger; no JSON schema.
        """
        found = []
        listed = isinstance(structures, (list, tuple)) and isinstance(triggers, (list, tuple))
        if not listed or not structures or not are_texts(triggers):
            raise InvalidInputError(
                f"structures={short(structures)}, triggers={short(triggers)}: allowed is a list of one or more dicts, "
                "and a list of texts that are not empty"
            )
        for structure in structures:
            begin = structure.get("begin") if isinstance(structure, Mapping) else None
            own = [t for t in triggers if isinstance(begin, str) and begin.startswith(t)]
            if not own or not isinstance(structure.get("end"), str) or "schema" not in structure:
                raise InvalidInputError(
                    f'structures has {short(structure)}: allowed are dicts with "begin" (which starts with one of the '
                    f'triggers {short(list(triggers))}), "schema" and "end"'
                )
            schema = json.loads(cls.json(structure["schema"]).source)  # never Lark, which services refuse
            found.append({"trigger": own[0], "begin": begin, "schema": schema, "end": structure["end"]})
        return cls("structural_tag", json.dumps(found))

    @classmethod
    def of_response_format(cls, given: Fields) -> Grammar | None:
        """From OpenAI's `response_format`, `given` as a dict; None of {"type": "text"}. Also "regex", "grammar" (Lark),
        "choice" and "structural_tag", each with a field of that name or, of the last, with "structures" and "triggers".

        Raises:
            InvalidInputError: another type, or what it needs is missing.
        """
        kind = given.get("type")
        if not isinstance(kind, str):
            kind = None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json()
        schema = given.get("json_schema")
        if kind == "json_schema" and isinstance(schema, Mapping):
            return cls.json(schema.get("schema", schema))
        made = {"regex": cls.regex, "grammar": cls.lark, "choice": cls.choice}
        if kind in made and kind in given:
            return made[kind](given[kind])
        if kind == "structural_tag" and "structures" in given:
            return cls.structural_tag(given["structures"], given.get("triggers", ()))
        raise refuse(
            "response_format",
            dict(given),
            '{"type": "text" | "json_object"}, {"type": '
            '"json_schema", "json_schema": {"schema": …}}, or "regex", "grammar", "choice", "structural_tag"',
        )


def grammar(name: str, given: Any) -> Any:
    """A grammar as a request takes it; None of a response_format for plain text. Raises InvalidInputError."""
    if isinstance(given, Mapping):
        return Grammar.of_response_format(given)
    if isinstance(given, (Grammar, DecidedElsewhere)) or (
        isinstance(given, TokenMatcher) and not isinstance(given, type)
    ):
        return given
    raise refuse(name, given, _GIVEN)


def _marker(name: str, given: Any) -> Marker | None:
    if given is None or (isinstance(given, str) and given):
        return given
    if isinstance(given, (str, bytes, Mapping)) or not (found := token_ids(name, given)):
        raise refuse(name, given, "a text that is not empty, or token ids")
    return found


@dataclass(frozen=True)
class DecidedElsewhere:
    """On all ranks but the first: a request has a grammar, and what it allows is decided there."""
