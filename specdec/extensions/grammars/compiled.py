"""GrammarCompiler: grammars for the tokens of one tokenizer, by llguidance (extra `[grammar]`); the last ones are kept.

Source: guidance-ai/llguidance, python/llguidance/_lib.pyi; docs/syntax.md ("@name", "<[id]>").
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from attention.cached import cached_property
from specdec.errors import InvalidInputError
from specdec.extensions.grammars.schemas import MarkerFinder, readable, strings_of
from specdec.extensions.grammars.worker import GrammarThread, workers_of
from specdec.requests.grammar import Grammar, Marker
from specdec.user_warnings import warn_user
from specdec.values import IdSequence, short

MOST_SPACE = r"[\x20\x0A\x0D\x09]{1,8}"
"""White space allowed between two parts of JSON: models that pad it would otherwise do so up to max_new_tokens."""
_MOST_SPACES = 64
"""Tokens of white space between a begin marker and the end of a prompt."""
_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{most}}}" for most in (*range(1, 11), 12, 16, 20, 30)), f"{_TEXT}+"]
"""Kinds of tokens of which llguidance allows all at once; its default has texts of at most 10 and 30 characters alone.
Of a string near its `maxLength` the masks take half as long: 0.05 ms in the mean of 200 for 0.09, 1.1 at most for 2.1
(128k tokens, one core)."""
_KEPT = 256
COMPILE_SECONDS = 30.0
FILL_SECONDS = 4.0
"""Time limits of llguidance: to compile a grammar, and to compute the masks of next tokens (usually tens of us)."""
_MOST_LOST = 8
MOST_TEMPLATES = 16
_QUICK_SECONDS = 0.02
"""A grammar that compiles as quickly is compiled for each of its first 16 requests, when they come."""
STUCK = (
    f"llguidance did not say within {FILL_SECONDS:g} s which tokens may come next: a part that repeats may take all of "
    'what must follow it, as in Lark /a*/ "a"'
)
_MOST_ITEMS = 100_000
"""Of llguidance's parser in one step: its default of 2,000 is less than a schema of 1,200 properties takes."""
_QUOTED = re.compile(r'//.*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/')
"""Texts and regular expressions of a Lark grammar, and its comments."""
_BETWEEN = re.compile(r'"(item_separator|key_separator|whitespace_pattern)": ')
"""Keys of `x-guidance` whose regular expressions a user writes; a property called so costs speed alone."""
_JSON_TEXT = '{}[]":, 0123456789truefalsn'
Ids = list[int]


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar over the tokens of a vocabulary, at its start.

    Attributes:
        vocabulary: compiler of its tokenizer. templates: llguidance matchers, to be copied. another: compiles one more.
        begin: its begin marker, if any. returns: whether text is free again after its end. can_loop: whether llguidance
            might never return from computing forced tokens, a call that holds the GIL; then it is not called.
    """

    vocabulary: GrammarCompiler
    templates: list[Any]
    another: Callable[[], Any] | None
    begin: MarkerFinder | None
    returns: bool
    can_loop: bool
    _free: dict[int, np.ndarray | None] = field(init=False, repr=False, default_factory=dict)  # by state of the marker
    _turns: Iterator[int] = field(init=False, repr=False, default_factory=itertools.count)
    _requests: Iterator[int] = field(init=False, repr=False, default_factory=itertools.count)

    def begins_after(self, prompt_ids: IdSequence) -> bool:
        """Whether it begins with the first new token: without a marker, or where the prompt ends with the marker's text
        and nothing but white space after it, of at most 64 tokens."""
        if self.begin is None:
            return True
        texts = self.vocabulary.spellings
        symbols = self.begin.symbols
        marker = bytes(symbols) if self.begin.is_text else b"".join(texts[i] for i in symbols)
        prompt = b"".join(texts[i] for i in prompt_ids[-len(marker) - _MOST_SPACES :])
        return bool(marker) and marker in prompt and not prompt.rpartition(marker)[2].strip()

    def matcher(self, begun: bytes = b"") -> Any | None:
        """A new matcher, after this text; None if the grammar cannot begin with it."""
        found = self.templates[next(self._turns) % len(self.templates)].deep_copy()
        tokens = self.vocabulary.tokenizer.tokenize_bytes(begun) if begun else []
        return found if found.try_consume_tokens(tokens) == len(tokens) else None

    def add_request(self) -> None:
        """Compile one more template for a request, if it is one of the first: copies of one take turns at its lock."""
        if self.another is not None and 1 <= next(self._requests) < MOST_TEMPLATES:
            try:
                self.templates.append(self.another())
            except ValueError:
                return  # it took too long this time, and there are others

    def free_mask(self, state: int) -> np.ndarray | None:
        """Mask [W] int32 of the tokens allowed outside of the grammar, None for all. Excluded are tokens whose text
        completes the marker and then continues in a way that the grammar cannot begin."""
        assert self.begin is not None
        if not self.begin.is_text:
            return None
        if state not in self._free:
            each = self.vocabulary.tokens_before_end(self.begin.symbols[-1])
            rests = ((token_id, self.begin.after(state, token_id)[1]) for token_id in each)
            banned = [token_id for token_id, rest in rests if rest and self.matcher(rest) is None]
            self._free[state] = self.vocabulary.without(banned) if banned else None
        return self._free[state]


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Attributes:
        tokenizer: llguidance's. words: W of a mask, 32 tokens each. eos: the id that means the grammar's end in masks.
        given_up: grammars from which llguidance did not return; their requests end, and new ones are refused.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int) -> None:
        """vocab_size: logits of the model. Raises InvalidInputError: no llguidance, or no tokenizer that it reads."""
        try:
            import llguidance.hf
            import llguidance.numpy
        except ImportError:
            raise InvalidInputError(
                "a grammar needs llguidance, which is not installed: pip install 'specdec-hf[grammar]'; or give an "
                "object with fill, advance and rollback"
            ) from None
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InvalidInputError(
                f"a grammar needs a fast tokenizer (PreTrainedTokenizerFast), not {type(tokenizer).__name__}; or an "
                "object with fill, advance and rollback"
            )
        self._lib = llguidance
        self.eos = eos
        size = max(vocab_size, len(tokenizer))
        self.words = -(-size // 32)
        self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=eos, slices=SLICES)
        added = {token_id: token for token_id, token in tokenizer.added_tokens_decoder.items() if str(token)}
        self._special = {str(token): token_id for token_id, token in added.items()}
        self._hidden = [str(token) for token_id, token in added.items() if token.special or token_id == eos]
        self.kept = OrderedDict[Grammar, CompiledGrammar]()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._before_end: dict[int, Ids] = {}
        self._workers = workers_of(llguidance)
        self.given_up = set[CompiledGrammar]()

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar, compiled or as it was kept.

        Raises:
            InvalidInputError: it is no grammar; it has unsupported parts; nothing can match it, or no tokens spell it;
                llguidance did not return from it, or from too many others.
        """
        if (found := self._found(grammar)) is not None:
            return found
        with self._compiling:  # not under `_lock`: rounds look up compiled grammars, and wait for no compiler
            if (found := self._found(grammar)) is None:
                found = self.compile(grammar)
                with self._lock:
                    self.kept[grammar] = found
                    if len(self.kept) > _KEPT:
                        self.kept.popitem(last=False)
            return found

    def _found(self, grammar: Grammar) -> CompiledGrammar | None:
        """The grammar as it was kept. Raises InvalidInputError: see `compiled`."""
        with self._lock:
            found = self.kept.get(grammar)
            if found in self.given_up:
                raise InvalidInputError(f"grammar {grammar.kind} {short(grammar.source)}: {STUCK}")
            if found is None and self._workers.lost >= _MOST_LOST:
                raise InvalidInputError(
                    f"llguidance did not return from {self._workers.lost} calls, and each keeps a thread busy: no new "
                    "grammar is taken until the process is started again"
                )
            if found is not None:
                self.kept.move_to_end(grammar)
            return found

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        named = f"grammar {grammar.kind} {short(grammar.source)}"
        try:
            text = self._text(grammar)
            began = time.perf_counter()
            matcher = self._matcher(text)
            is_quick = time.perf_counter() - began < _QUICK_SECONDS
            for warning in matcher.get_grammar_warnings():
                warn_user(f"{named}: {warning}")
            self._check_spelled(grammar, matcher)
            self._check_special(grammar, text)
        except (ValueError, TypeError, AssertionError, RecursionError, OverflowError) as error:
            raise InvalidInputError(f"{named}: {error}") from None
        begin = None if grammar.begin is None else self._finder(grammar.begin)
        another = partial(self._matcher, text) if is_quick else None
        return CompiledGrammar(self, [matcher], another, begin, grammar.end is not None, _can_loop(grammar))

    def _matcher(self, text: str) -> Any:
        """A matcher of a grammar in llguidance's form. Raises ValueError: it is wrong, or takes too long."""
        limits = self._lib.LLParserLimits(max_items_in_row=_MOST_ITEMS, step_max_items=10 * _MOST_ITEMS)
        made = []

        def make(_: GrammarThread) -> None:
            made.append(self._lib.LLMatcher(self.tokenizer, text, log_level=0, limits=limits))

        if not self._workers.returns(make, COMPILE_SECONDS):
            raise ValueError(f"llguidance did not compile it within {COMPILE_SECONDS:g} s")
        if made[0].is_error():
            raise ValueError(str(made[0].get_error()).strip())
        return made[0]

    def _check_special(self, grammar: Grammar, text: str) -> None:
        """text: the grammar for llguidance. Raises ValueError: a special token is part of its text.

        Where such a text must come, llguidance allows the tokenizer's own way to write it, which is that token: it ends
        the request, or is no part of its text.
        """
        try:
            larks = [own.get("lark_grammar") or "" for own in json.loads(text)["grammars"]]
        except ValueError:
            larks = [text]
        quoted = [each for own in larks for each in _QUOTED.findall(own) if not each.startswith("//")]
        texts = [re.sub(r"\\(.)", r"\1", each) for each in quoted]
        if grammar.kind == "json":
            texts += strings_of(json.loads(grammar.source))
        for each, hidden in itertools.product(texts, self._hidden):
            if hidden in each:
                raise ValueError(
                    f"{short(each)} has {hidden}, a special token, which no text of a grammar can have; in "
                    "Lark write it without quotes, as begin or end give its id"
                )

    def _check_spelled(self, grammar: Grammar, matcher: Any) -> None:
        """Raises ValueError: the vocabulary has no tokens for it."""
        first = matcher.deep_copy()
        mask = np.zeros((1, self.words), np.int32)
        if not self.fill([(first, 0, [])], mask):
            raise ValueError(STUCK)
        texts = []
        if grammar.kind == "json":
            texts = [_JSON_TEXT, *strings_of(json.loads(grammar.source))]
        elif grammar.kind == "choice":
            texts = json.loads(grammar.source)
        markers = (grammar.begin, grammar.end)
        texts += [marker for marker in markers if isinstance(marker, str) and marker not in self._special]
        make = self.tokenizer
        written = ((text, text.encode("utf-8", "replace")) for text in texts)
        missing: list[Any] = [text for text, own in written if make.decode_bytes(make.tokenize_bytes(own)) != own]
        ids = [token_id for marker in markers if isinstance(marker, tuple) for token_id in marker]
        missing += [token_id for token_id in ids if token_id >= make.vocab_size]
        if first.is_error() or not mask.any() or missing:
            what = short(missing[0]) if missing else "its first character"
            raise ValueError(f"the tokenizer has no tokens that spell {what}")

    def fill(self, chains: Sequence[tuple[Any, int, Ids]], masks: np.ndarray, can_loop: bool = True) -> bool:
        """Write the masks [N, W] of chains (matcher, first row, drafts): one row before each draft and one after the
        last. Rows behind a draft that may not come are left as they are.

        Two calls of llguidance: for all chains with drafts, and for all without. The matchers must be copies that are
        not used again: llguidance rolls drafts back afterwards, and a matcher that was rolled back over a token given
        by its id (`<[id]>`) returns wrong masks from then on.

        can_loop: whether one of their grammars can; else they are filled by the caller's thread.

        Returns:
            Whether llguidance returned within `FILL_SECONDS`; else the matchers are lost, and masks unfinished.
        """
        numbers = self._lib.numpy
        drafted = [chain for chain in chains if chain[2]]
        alone = [(matcher, row) for matcher, row, drafts in chains if not drafts]

        def write(worker: GrammarThread) -> None:
            if drafted:
                numbers.fill_next_token_bitmask_par_with_draft_tokens(worker.executor, drafted, masks)
            if alone:
                numbers.fill_next_token_bitmask_par(worker.executor, alone, masks)

        return not chains or self._workers.returns(write, FILL_SECONDS if can_loop else None)

    def without(self, banned: Ids) -> np.ndarray:
        """A mask [W] int32 of all tokens but these."""
        allowed = np.ones(32 * self.words, np.bool_)
        allowed[banned] = False
        return np.packbits(allowed, bitorder="little").view(np.int32)

    @cached_property
    def only_end(self) -> np.ndarray:
        """A mask [W] int32 of the end id (`eos`) alone."""
        return ~self.without([self.eos])

    def tokens_before_end(self, symbol: int) -> Ids:
        """Tokens whose text has this byte before its end."""
        if symbol not in self._before_end:
            each = enumerate(self.spellings)
            self._before_end[symbol] = [token_id for token_id, text in each if symbol in text[:-1]]
        return self._before_end[symbol]

    @cached_property
    def spellings(self) -> tuple[bytes, ...]:
        """The text of every token."""
        return tuple(self.tokenizer.decode_bytes([token_id]) for token_id in range(self.tokenizer.vocab_size))

    def _finder(self, marker: Marker) -> MarkerFinder:
        if isinstance(marker, str):
            return MarkerFinder(tuple(marker.encode()), lambda token_id: self.spellings[token_id], True)
        return MarkerFinder(marker, lambda token_id: (token_id,))

    def _text(self, grammar: Grammar) -> str:
        """For llguidance: the grammar, and its end marker after it. Raises ValueError."""
        body = self._body(grammar)
        if grammar.begin is None:
            return body
        try:
            own = json.loads(body)["grammars"][0]
        except ValueError:
            own = {"lark_grammar": body}
        if isinstance(grammar.end, str) and grammar.end not in self._special and grammar.kind in ("regex", "choice"):
            term = own["lark_grammar"].replace("start:", "BODY:", 1)  # a separate terminal: it may have flags, | and $
            end = json.dumps(grammar.end)
            return f"start: whole\nwhole[lazy]: BODY END\n{term}\nEND: {end}\n"  # greedy terms take an end as text
        space = "SPACE " if grammar.kind == "json" else ""
        lark = f"start: {space}@body {self._written(grammar.end)}\nSPACE: /[ \\t\\r\\n]{{0,8}}/\n"
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, own | {"name": "body"}]})

    def _body(self, grammar: Grammar) -> str:
        make = self._lib.LLMatcher
        if grammar.kind == "json":
            return self._json(json.loads(grammar.source))
        if grammar.kind == "regex":
            return str(make.grammar_from_regex(grammar.source))
        if grammar.kind == "choice":
            return str(make.grammar_from_regex("|".join(map(re.escape, json.loads(grammar.source)))))
        if grammar.kind == "lark":
            return str(make.grammar_from_lark(grammar.source))
        # Free text with a structure after each trigger: the token that is called so, or its text in other tokens.
        tags = json.loads(grammar.source)
        triggers = [tag["trigger"] for tag in tags]
        others = [str(i) for text, i in self._special.items() if text not in triggers and i != self.eos]
        parts = [f"TEXT <[{','.join(others)}]>"] if others else []
        lark = "TEXT: /(.|\\n)*/\n"
        for place, (tag, trigger) in enumerate(zip(tags, triggers, strict=True)):
            # Two literals: one with a special token's text would be refused; here the token itself may come, too.
            text = f"/{trigger}/" if tag.get("pattern") else f"{json.dumps(trigger[:-1])} {json.dumps(trigger[-1])}"
            lark += f"head_{place}[lazy]: TEXT {text}\n"
            token = f" | TEXT {self._written(trigger)}" if trigger in self._special else ""
            schema = json.loads(self._json(tag["schema"]))["grammars"][0]["json_schema"]
            body = f"%json {json.dumps(schema, ensure_ascii=False)}"
            begin = self._marked(tag["begin"][len(trigger) :])
            end = self._marked(tag["end"])
            parts.append(f"(head_{place}{token}) {begin} {body} {end}")
        return f"{lark}start: ({' | '.join(parts)})* TEXT"

    def _json(self, schema: Any) -> str:
        own = readable(schema, self._lib)
        told = own.get("x-guidance") if isinstance(own, dict) else None
        space: Any = {"whitespace_pattern": MOST_SPACE}
        if isinstance(told, dict) and {"whitespace_flexible", "whitespace_pattern"} & set(told):
            space = {}
        return str(self._lib.LLMatcher.grammar_from_json_schema(json.dumps(own), defaults=space))

    def _marked(self, text: str) -> str:
        """A text in Lark's syntax; added tokens in it as tokens."""
        pieces = re.split("|".join(f"({re.escape(own)})" for own in self._special) or "(?!)", text)
        return " ".join(self._written(piece) for piece in pieces if piece)

    def _written(self, marker: Marker | None) -> str:
        """A marker in Lark's syntax."""
        if isinstance(marker, str):
            special = self._special.get(marker)
            return json.dumps(marker) if special is None else f"<[{special}]>"
        return " ".join(f"<[{token_id}]>" for token_id in marker or ())


def _can_loop(grammar: Grammar) -> bool:
    """Whether a part that repeats may take what must follow it: users' Lark, a number before an end of digits, and
    separators or white space of a schema's own (`x-guidance`)."""
    if grammar.kind in ("lark", "regex"):
        return grammar.kind == "lark"
    own = json.loads(grammar.source)
    tags = own if grammar.kind == "structural_tag" else []
    ends = [end for end in (grammar.end, *(tag["end"] for tag in tags)) if isinstance(end, str)]
    return any(end[:1] in "+-.0123456789eE" for end in ends) or bool(_BETWEEN.search(json.dumps(own)))


_compilers: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], GrammarCompiler]] = weakref.WeakKeyDictionary()


def compiler_of(tokenizer: Any, vocab_size: int, eos: int) -> GrammarCompiler:
    """The compiler of a tokenizer, made once: it takes about a second of a large vocabulary. Raises as it does."""
    try:
        own = _compilers.setdefault(tokenizer, {})
    except TypeError:  # it cannot be referred to weakly
        own = {}
    key = vocab_size, eos
    if key not in own:
        own[key] = GrammarCompiler(tokenizer, vocab_size, eos)
    return own[key]
