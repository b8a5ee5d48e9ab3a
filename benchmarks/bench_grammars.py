"""Rounds whose rows have a grammar beside rounds without, and what filling the masks takes.

    python -m benchmarks.bench_grammars --shape llama-3.1-8b --drafts 3,0 --rows 32 --out grammars.jsonl
    python -m benchmarks.bench_grammars --shape tiny --device cpu --drafts 3 --rows 8 --new-tokens 64 --out out.jsonl
    python -m benchmarks.bench_grammars --built-in --rows 8 --out drafts.jsonl

Random weights, greedy, decided as they are: the head's drafts are rarely what a grammar allows. A vocabulary of the
model's size is made of all bytes and of random words. Kinds take turns in one process: no row has a grammar, all have
the same JSON schema, one has. Filling is measured once more with drafts that may all come, the tokens that followed.

With --built-in the built-in pair on a CPU generates JSON, with each kind of drafts: a head's, the first one masked or
not, with the tokens that must come in their place or not; lookup with and without these; none. With white space and
without.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.bench_round import Moments, measure, prompts
from benchmarks.document import provenance, publish, usage
from benchmarks.engines import sizes_of
from benchmarks.given import Listed, ResultFile, wait_for
from benchmarks.shapes import SHAPES, random_pair
from specdec import Grammar
from specdec.extensions.grammars.compiled import GrammarCompiler, compiler_of
from specdec.extensions.grammars.masks import GrammarColumns, GrammarMasks
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams

PROMPT, END, TURNS = 512, 0, 3


def schema(text: dict[str, Any]) -> dict[str, Any]:
    """An endless list of objects with strings of this kind."""
    fields = {"name": text, "age": {"type": "integer"}, "tags": {"type": "array", "items": text}}
    each = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "minItems": 500, "items": each}


SCHEMAS = {
    "plain": schema({"type": "string"}),
    "at most": schema({"type": "string", "maxLength": 200}),
    "lengths": schema({"type": "string", "minLength": 20, "maxLength": 60}),
}
"""By name. Of strings that must have certain lengths a mask is made token by token: the slowest that llguidance has."""


def vocabulary(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens: the end, all bytes, words of two to ten letters, half of them after a space."""
    rng, byte_tokens = np.random.default_rng(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(["<end>", *byte_tokens])
    while len(words) < size:
        letters = "".join(chr(97 + int(i)) for i in rng.integers(0, 26, int(rng.integers(2, 11))))
        words["Ġ" * int(rng.integers(2)) + letters] = None
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


class Fills:
    """Seconds of every filling of masks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._fill = GrammarCompiler.fill

    def __enter__(self) -> Fills:
        def timed(compiler: GrammarCompiler, *given: Any) -> bool:
            start = time.perf_counter()
            returned = self._fill(compiler, *given)
            self.seconds.append(time.perf_counter() - start)
            return returned

        GrammarCompiler.fill = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        GrammarCompiler.fill = self._fill  # type: ignore[method-assign]

    @property
    def facts(self) -> dict[str, float]:
        """Milliseconds."""
        each = np.array(self.seconds or [0.0]) * 1e3
        return {"fill_ms_median": float(np.median(each)), "fill_ms_p99": float(np.quantile(each, 0.99))}


def filled_with_legal_drafts(
    compiler: GrammarCompiler, own: Grammar, sequences: list[list[int]], drafts: int
) -> dict[str, float]:
    """Filling of a batch's masks where every draft may come: at each place of the texts the tokens that follow."""
    grammar = compiler.compiled(own)
    matchers = [grammar.matcher() for _ in sequences]
    masks = np.full((len(sequences) * (drafts + 1), compiler.words), -1, np.int32)
    with Fills() as fills:
        for at in range(min(map(len, sequences)) - drafts - 1):
            chains = [
                (matcher, i * (drafts + 1), ids[at : at + drafts])
                for i, (matcher, ids) in enumerate(zip(matchers, sequences, strict=True))
            ]
            compiler.fill(chains, masks)
            for matcher, ids in zip(matchers, sequences, strict=True):
                matcher.try_consume_tokens([ids[at]])
    return fills.facts


def measured(
    model: SpeculativeModel, read: Moments, tokenizer: Any, ids: list[list[int]], new_tokens: int, grammar: Grammar
) -> list[dict[str, Any]]:
    """A line for each kind."""
    plain = SamplingParams(new_tokens, ignore_eos=True, cache_prefix=False)
    own = SamplingParams(new_tokens, grammar=grammar, stop_token_ids=(END,), cache_prefix=False)
    kinds = {"nothing": [plain] * len(ids), "all rows": [own] * len(ids), "one row": [own] + [plain] * (len(ids) - 1)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    sequences: list[list[int]] = []
    for turn in range(TURNS + 1):
        for name, params in kinds.items():
            with Fills() as fills:
                result, tokens = measure(model, read, ids, params, 1)
            if turn:
                found[name].append(result | fills.facts)
            if name == "all rows":
                sequences = [each[len(prompt) :] for each, prompt in zip(tokens, ids, strict=True)]
    compiler, drafts = compiler_of(tokenizer, model.hf_model.config.vocab_size, END), model.num_speculative_tokens
    legal = filled_with_legal_drafts(compiler, grammar, sequences, drafts)
    lines = []
    for name, turns in found.items():
        median = {key: float(np.median([turn[key] for turn in turns])) for key in turns[0] if key != "step_ms_runs"}
        ratios = [a["step_ms_median"] / b["step_ms_median"] for a, b in zip(turns, found["nothing"], strict=True)]
        more = {f"legal_drafts_{key}": value for key, value in legal.items()} if name == "all rows" else {}
        lines.append({"grammar": name, "over_nothing": float(np.median(ratios)), "ratios": ratios} | median | more)
    return lines


OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_customer": {"type": "string", "maxLength": 12},
        "number_of_apples": {"type": "integer", "minimum": 0, "maximum": 99},
        "address": {
            "type": "object",
            "properties": {"street": {"enum": ["High Street", "Low Street"]}, "zip_code": {"type": "integer"}},
            "required": ["street", "zip_code"],
            "additionalProperties": False,
        },
        "paid_in_full": {"type": "boolean"},
    },
    "required": ["name_of_customer", "number_of_apples", "address", "paid_in_full"],
    "additionalProperties": False,
}
ASKED = "Question: Anna has {} apples and buys 8 more. How many apples does she have?\nAnswer:"
LIMITED, FORCED = ", first one masked", ", and forced"
PAIRS: tuple[tuple[str, str | None, int, tuple[str, ...]], ...] = (
    ("none", None, 0, ("",)),
    ("EAGLE-3, K = 3", "auto", 3, ("", FORCED, LIMITED, LIMITED + FORCED)),
    ("EAGLE-3, K = 8", "auto", 8, ("", FORCED, LIMITED, LIMITED + FORCED)),
    ("lookup, K = 8", "lookup", 8, ("", FORCED)),
)
"""Name, head, K, and what is done with the drafts for the grammar's sake."""


def kinds_of_drafts(rows: int) -> list[dict[str, Any]]:
    """A line for each kind and each way with white space: tokens a round of a request, and a second."""
    lines = []
    asked = [ASKED.format(i) for i in range(rows)]
    for pair, draft, k, kind in [(*own, kind) for *own, kinds in PAIRS for kind in kinds]:
        name = pair + kind
        options: dict[str, Any] = {"num_speculative_tokens": k, "max_num_seqs": rows, "enable_prefix_caching": False}
        plain = nullcontext() if FORCED in kind else patch.object(GrammarColumns, "give_forced", lambda *_: None)
        free = nullcontext() if LIMITED in kind else patch.object(GrammarMasks, "limits_drafts", False)
        with plain, free, SpeculativeModel.from_pretrained("gsm-llama", draft, device="cpu", **options) as model:
            for white in (False, True):
                own = OBJECT | {"x-guidance": {"whitespace_flexible": False}} if not white else OBJECT
                params = SamplingParams(150, grammar=Grammar.json(own))
                seconds, found = [], model.generate(asked, params)
                for _ in range(2 * TURNS - 1):
                    start = time.perf_counter()
                    found = model.generate(asked, params)
                    seconds.append(time.perf_counter() - start)
                tokens, rounds = (
                    sum(len(own(c)) for c in found) for own in (lambda c: c.token_ids, lambda c: c.stats.rounds)
                )
                speed = tokens / float(np.median(seconds))
                lines.append(
                    {"drafts": name, "white_space": white, "tau": (tokens - rows) / rounds, "tokens_per_s": speed}
                )
    return lines


@click.command(help=usage(__doc__))
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="llama-3.1-8b", show_default=True)
@click.option("--built-in", "built_in", is_flag=True, help="In place of a shape: kinds of drafts, on a CPU.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--drafts", type=Listed(click.IntRange(0)), default="3,0", show_default=True)
@click.option("--rows", type=Listed(click.IntRange(1)), default="32", show_default=True)
@click.option("--new-tokens", type=click.IntRange(32), default=128, show_default=True)
@click.option("--schema", type=click.Choice(list(SCHEMAS)), default="at most", show_default=True, help="Its strings.")
@click.option("--hold", type=click.Path(path_type=Path), help="Measure once this file exists; FILE.ready says so.")
@click.option("--out", type=ResultFile(), required=True, help="JSON lines are appended.")
def main(
    shape: str,
    built_in: bool,
    device: str,
    drafts: list[int],
    rows: list[int],
    new_tokens: int,
    schema: str,
    hold: Path | None,
    out: Path,
) -> None:
    """Measure every K and batch."""
    if built_in:
        publish({"benchmark": "grammar_drafts", "rows": rows[0], "results": kinds_of_drafts(rows[0])}, out, append=True)
        return
    pair = random_pair(shape, torch.bfloat16, torch.device(device))
    vocab = pair.target.config.vocab_size
    tokenizer, grammar = vocabulary(vocab), Grammar.json(SCHEMAS[schema])
    graphs: dict[str, Any] = {"cuda_graphs": True} if device == "cuda" else {}
    for k in drafts:
        sizes = sizes_of(k, rows, PROMPT, new_tokens, None)
        head = pair.head if k else None
        options = sizes | graphs | {"num_speculative_tokens": k, "enable_prefix_caching": False}
        with SpeculativeModel.from_pretrained(pair.target, head, tokenizer=tokenizer, **options) as model:
            if hold is not None and k == drafts[0]:
                wait_for(hold)
            read = Moments()
            model.engine.executor.reads.after_read = read.note
            for count in rows:
                facts = {"benchmark": "grammars", "shape": shape, "schema": schema, "drafts": k, "rows": count}
                ids = prompts(count, (PROMPT, PROMPT), vocab)
                for line in measured(model, read, tokenizer, ids, new_tokens, grammar):
                    text = json.dumps(facts | {"prompt": PROMPT, "new_tokens": new_tokens} | line | provenance())
                    click.echo(text[:400])
                    with out.open("a") as file:
                        file.write(text + "\n")


if __name__ == "__main__":
    main()
