"""Numbers in pages are those of the committed results: lines are written again from their files, and found."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cpu_results import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMPARED = {
    "The built-in pairs": "in part: the pairs and lookup on a CPU",
    "Rounds on a GPU": "in part: all but starts and commits whose files lack a shape",
    "Workloads on a GPU": "in part: the table and the first token",
    "Hybrid targets": "in part: both tables",
    "Targets in FP8": "in part: the table",
    "A published model on a CPU": "in part: equal tokens; its linear layers alone were measured by hand",
    "Half precision": "wholly",
    "Mixtures of experts": "wholly",
    "Sampled rows, and the older commit": "in part: times in tables; ratios come from runs side by side",
    "Block-parallel heads": "in part: all but floors of a block alone",
    "Shared prefixes": "not: ratios alone",
    "Scripts that are gone": "it has no numbers",
}
"""Sections of docs/performance.md, and whether their numbers are compared."""


def page(name: str) -> str:
    """Its text in one line."""
    return " ".join((ROOT / name).read_text("utf-8").split())


def lines(name: str) -> list[dict[str, Any]]:
    """Rows of a results file; a JSON file is one."""
    text = (RESULTS / name).read_text("utf-8")
    return [json.loads(text)] if name.endswith(".json") else [json.loads(row) for row in text.splitlines() if row]


def rounds(name: str, **wanted: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows of a file of rounds by (K, rows); the last one of a kind."""
    wanted = {"shape": "llama-3.1-8b", "prompt": [512, 512], "plan_from": "host"} | wanted
    return {
        (row["drafts"], row["rows"]): row
        for row in lines(name)
        if all(row.get(key, value) == value for key, value in wanted.items())
    }


def ms(row: dict[str, Any]) -> str:
    return f"{row['step_ms_median']:.2f}"


def listed(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def dense() -> Iterator[str]:
    found = rounds("round-h200-2026-11-21-e.jsonl")
    for rows in (1, 8, 32, 128):
        each = [found[k, rows] for k in (0, 3, 5)]
        rates = ", ".join(f"{row['tokens_per_s']:,.0f}" for row in each)
        yield f"| {rows} | {' | '.join(f'{ms(row)} ms' for row in each)} | {rates}"
    yield f"at one row is {listed([format(found[k, 1]['floor_ms'], '.2f') for k in (0, 3, 5)])} ms"
    shares = [found[5, rows]["by_events"]["exposed_host_share"] for rows in (1, 8, 32, 128)]
    yield f"waits for the host in {min(shares):.1%}".replace("%", f" to {max(shares):.1%}").replace("%", " %")
    qwen = rounds("round-h200-2026-11-21-e.jsonl", shape="qwen3-8b")
    yield f"Qwen3-8B shape, K = 5: {listed([ms(qwen[5, rows]) for rows in (1, 8, 32)])} ms"
    older = rounds("round-h200-2026-11-21-d.jsonl", commit="0632009")
    ratio = older[5, 1]["tokens_per_s"] / older[0, 1]["tokens_per_s"]
    yield f"took {ms(older[5, 1])} ms at 1 row with K = 5 and {ms(older[0, 1])} ms without drafts ({ratio:.2f}×"
    lite = rounds("round-h200-2026-11-21-d.jsonl", shape="deepseek-v2-lite")
    yield f"K = 3: {ms(lite[3, 1])} ms at 1 row ({lite[3, 1]['tokens_per_s']:.0f} tokens/s), {ms(lite[3, 8])} at 8"


def hybrid() -> Iterator[str]:
    found = rounds("round-h200-2026-11-23-hybrid.jsonl", shape="qwen3.5-9b")
    for rows in (1, 8, 32):
        each = [found[k, rows] for k in (0, 1, 3)]
        cells = " | ".join(f"{ms(row)} ms, {row['over_floor']:.2f}" for row in each)
        yield f"| {rows} | {cells} | {', '.join(format(row['tokens_per_s'], ',.0f') for row in each)}"
    now = rounds("round-h200-2026-11-23-hybrid-b.jsonl", shape="qwen3.5-9b")
    before = rounds("round-h200-2026-11-23-hybrid-b.jsonl", shape="qwen3.5-9b (states stored in every round)")
    for rows in (1, 32):
        both = [f"{ms(before[k, rows])}, {ms(now[k, rows])} ms, {now[k, rows]['over_floor']:.2f}" for k in (1, 3)]
        yield f"| {rows} | {ms(now[0, rows])} ms, {now[0, rows]['over_floor']:.2f} | {' | '.join(both)} |"


def blocks() -> Iterator[str]:
    found = lines("block-h200-2026-11-30.jsonl")
    for rows in (1, 8, 32):
        for kind, share in (("greedy", None), ("sampled", 0.0)):
            each = [row for row in found if row["rows"] == rows and row.get("greedy_share") == share]
            cells = [f"{ms(row)} ms, {row['over_floor']:.2f}, {row['tokens_per_s']:,.0f}" for row in each]
            yield f"| {rows} | {kind} | {' | '.join(cells)} |"
    drafts = [format(row["by_events"]["graph_ms"][0], ".2f") for row in found if row["rows"] == 1][:4]
    yield f"takes {drafts[0]} ms and one of DSpark {drafts[2]}"
    yield f"a sampled one {drafts[1]} and {drafts[3]},"
    again = [row for row in lines("block-h200-2026-11-30-b.jsonl") if row["drafts"] == 15]
    for row in (row for row in again if row.get("greedy_share") == 0.0):
        yield f"{ms(row)} ms ({row['tokens_per_s']:,.0f} tokens/s)"
    yield f"a sampled block at one row {again[1]['by_events']['graph_ms'][0]:.2f}"


def in_fp8() -> Iterator[str]:
    found = rounds("round-h200-2026-11-23-fp8.jsonl")
    both = lines("round-h200-2026-11-22-fp8.jsonl")
    for rows in (1, 8, 32):
        fp8, bf16 = sorted(
            (r for r in both if (r["drafts"], r["rows"]) == (0, rows)), key=lambda r: r["step_ms_median"]
        )
        plain, drafted = found[0, rows], found[5, rows]
        ratio = f"{ms(bf16)} ms | {fp8['step_ms_median'] / bf16['step_ms_median']:.2f}"
        yield f"| {rows} | {ms(plain)} ms, {plain['over_floor']:.2f} | {ratio} |"
        yield f"| {ms(drafted)} ms, {drafted['over_floor']:.2f}, {drafted['tokens_per_s']:,.0f} |"


def times(name: str, rows: tuple[int, ...] = (1, 8, 32), **wanted: Any) -> str:
    """Medians of a kind of rounds at so many rows, in order; greedy rounds have neither field of sampled ones."""
    wanted = {"sampled": None, "greedy_share": None, "entropy": None} | wanted
    kind = [row for row in lines(name) if all(row.get(key) == value for key, value in wanted.items())]
    return ", ".join(ms(next(row for row in kind if row["rows"] == n)) for n in rows)


def sampled() -> Iterator[str]:
    draws, kinds, modules = (f"round-h200-2026-11-22-{name}.jsonl" for name in ("draws", "kinds", "modules"))
    all_sampled, half_greedy = {"sampled": True, "greedy_share": 0.0}, {"sampled": True, "greedy_share": 0.5}
    yield f"{times(kinds, drafts=0)} ms | | {times(kinds, drafts=0, **all_sampled)} |"
    one_nat = {"drafts": 3, "entropy": 1.0}
    yield f"{times(kinds, **one_nat)} | | {times(kinds, **one_nat, **all_sampled)} |"
    halves = times(draws, (8, 32), drafts=3, **half_greedy)
    yield f"{times(draws, drafts=3)} | –, {halves} | {times(draws, drafts=3, **all_sampled)} |"
    four = (1, 8, 32, 128)
    yield f"{times(draws, four, drafts=5)} | | {times(draws, four, drafts=5, **all_sampled)} |"
    for file, commit in ((draws, "2599be8"), ("round-h200-2026-11-23-f.jsonl", "fcd5d6a")):
        both = (times(file, four, drafts=5, commit=one) for one in (commit, "11c2809"))
        yield "{} ms against {} (".format(*both)
    for shape, k, name in (
        ("deepseek-v2-lite", 1, "DeepSeek-V2-Lite | 1 | {} ms | {} |"),
        ("deepseek-v2-lite", 3, "DeepSeek-V2-Lite | 3 | {} | {} |"),
        ("llama-3.1-8b-2-modules", 2, "two modules | 2 | {} | {} |"),
    ):
        yield name.format(*(times(modules, shape=shape, drafts=k, **kind) for kind in ({}, all_sampled)))
    for file, commit in (("", "142bd60"), ("-b", "3acb911"), ("-c", "a51d8dd"), ("-d", "dc71956"), ("-e", "2b6b4f6")):
        file = f"round-h200-2026-11-23{file}.jsonl"
        for rows in (1, 8, 32):
            each = [times(file, (rows,), drafts=3, commit=commit, **kind) for kind in ({}, half_greedy)]
            first = " ms" if (rows, commit) == (1, "142bd60") else ""
            yield f"| {commit if rows == 1 else ''} | {rows} | {each[0]}{first} | {each[1]} |".replace("|  |", "| |")


def mixtures() -> Iterator[str]:
    for file, shape, k, sampled_rows, name in (
        ("", "qwen3-30b-a3b", 3, False, "16 layers, K = 3: {} of the floor"),
        ("", "qwen3-30b-a3b", 0, False, "K = 0: {} at"),
        ("-b", "qwen3-next-80b", 3, False, "8 layers, K = 3: {} at"),
        ("-b", "qwen3-next-80b", 0, False, "K = 0: {} at"),
        ("-b", "qwen3-30b-a3b", 3, True, "16 layers, K = 3: {} at"),
        ("-b", "qwen3-30b-a3b", 0, True, "K = 0: {};"),
    ):
        wanted, rows = (shape, k, sampled_rows), lines(f"mixtures-h200-2026-11-28{file}.jsonl")
        each = [row for row in rows if (row["shape"], row["drafts"], row.get("sampled", False)) == wanted]
        yield name.format(listed([f"{row['over_floor']:.2f}" for row in each]))
        yield listed([f"{row['over_paired']:.2f}" for row in each])
    yield from _mixtures_c()
    yield from _mixtures_d()
    yield from _mixtures_e()
    (row,) = lines("draft-round-h200-2026-11-28.jsonl")
    yield f"{row['draft_vocab']:,} of {row['vocab']:,} tokens"
    yield f"{row['ratio']:.3f} of the time"


def _mixtures_c() -> Iterator[str]:
    rows = lines("mixtures-h200-2026-11-28-c.jsonl")

    def each(field: str, digits: int = 2, **wanted: Any) -> list[str]:
        return [
            f"{row[field]:.{digits}f}"
            for row in rows
            if field in row and all(row[key] == value for key, value in wanted.items())
        ]

    for layers, k, name in ((16, 1, "K = 1: {} of"), (16, 0, "K = 0: {};"), (8, 3, "K = 3: {};"), (8, 0, "K = 0: {};")):
        kind = {"layers": layers, "drafts": k, "weights": "model"}
        yield name.format(listed(each("over_floor", **kind)))
        yield listed(each("over_paired", **kind))
    for k in (0, 3):
        bf16, fp8 = (each("grouped_ms", 9, layers=8, drafts=k, weights=kind) for kind in ("model", "fp8"))
        ratios = [f"{float(a) / float(b):.2f}" for a, b in zip(fp8, bf16, strict=True)]
        yield f"K = {k} {listed(ratios)}"
        yield f"K = {k} took {listed(each('grouped_ms', drafts=k, weights='mxfp4'))} ms"
    first = next(row for row in rows if "requests" in row)
    yield f"greedy {statistics.median(first['grouped_tokens_per_s']):,.0f} tokens/s, {first['times_paired']:.2f} of"


def _mixtures_d() -> Iterator[str]:
    rows = lines("mixtures-h200-2026-11-28-d.jsonl")
    yield from _full_depth([row for row in rows if row["shape"] == "qwen3-30b-a3b" and "requests" not in row])
    (served,) = (row for row in rows if "requests" in row)
    yield f"{statistics.median(served['grouped_tokens_per_s']):,.0f} tokens/s, {served['times_paired']:.2f} of it"
    for row in lines("turns-h200-2026-11-28.jsonl"):
        yield "{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["interval"])


def _full_depth(own: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{own[0]['weights_gib']:.1f} GiB of weights, {own[0]['allocated_gib']:.1f} GiB allocated"
    for k in (3, 0):
        each = [row for row in own if row["drafts"] == k]
        times = listed([f"{row['grouped_ms']:.2f}" for row in each])
        yield f"K = {k} {times} ms"
        yield listed([f"{row['over_floor']:.2f}" for row in each])


def _mixtures_e() -> Iterator[str]:
    rows = lines("mixtures-h200-2026-11-28-e.jsonl")
    yield from _full_depth([row for row in rows if row["shape"] == "gpt-oss-20b"])
    for k, sampled in ((1, False), (3, True), (0, True)):
        kind = {"benchmark": "mixtures", "shape": "qwen3-next-80b", "drafts": k, "sampled": sampled}
        own = [row for row in rows if kind.items() <= row.items()]
        yield listed([f"{row['over_floor']:.2f}" for row in own])
        yield listed([f"{row['over_paired']:.2f}" for row in own])
    starts = [row["grouped_start_s"] for row in rows if row["shape"] == "qwen3-30b-a3b" and "grouped_start_s" in row]
    yield "in {:.0f} s with empty caches, and in {:.0f} s once".format(*starts)
    for shape in ("qwen3-30b-a3b", "qwen3-next-80b"):
        own = [row for row in rows if row["benchmark"] == "experts" and row["shape"] == shape]
        yield listed([f"{row['over_least']:.2f}" for row in own])
        for field in ("routed_us", "grouped_mm_us"):
            yield f"{listed([f'{row[field]:,.0f}' for row in own])} µs"


def published() -> Iterator[str]:
    own = lines("spec-bench-smollm2-cpu-2026-11-30.jsonl")
    packed, plain = own[0], own[1]
    chosen = ("translation", "rag", "summarization", "math_reasoning", "qa")
    taus = ", ".join(f"{category} {packed['tau'][category][0]:.2f}" for category in chosen)
    yield f"{packed['identical']} of {packed['prompts']} ({packed['tokens_equal']:,} tokens) | {taus} |"
    yield f"{plain['identical']} of {plain['prompts']} ({plain['tokens_equal']:,})"
    half = [row for row in own if row["dtype"] == "bfloat16"]
    kinds = [[row for row in half if row["linears"] == each] for each in ("packed", "plain")]
    for lookup, alone, against, *_ in kinds:
        yield f"{lookup['identical']} of 80, without drafts {alone['identical']} |"
        yield f"against no drafts | {against['identical']} of 80 |"
    widest = [max(row["widest"][dtype] for row in half) for dtype in ("bfloat16", "float32")]
    yield "at most {:.2f} apart in bfloat16".format(*widest)
    yield "and at most {1:.2f} in float32".format(*widest)
    exact = next(row for row in own if "float64" in row["dtype"])
    yield f"{exact['identical']} of {exact['prompts']} prompts that differed"
    starts = lines("first-token-cpu-2026-11-30-c.jsonl")
    for arm, of in (("first", "wall_s_over"), ("second", "wall_s_over"), ("first", "peak_mib_over")):
        ratios = [f"{row[of]:.2f}" for line in starts for row in line["results"] if row["arm"] == arm]
        yield f"{ratios[1]} and {ratios[3]}"
        yield f"{ratios[0]} and {ratios[2]}"
    for file in RESULTS.glob("peers-cpu-*.jsonl"):
        for document in lines(file.name):
            yield from (" ".join(row.split()) for row in table(document).splitlines())


def serving() -> Iterator[str]:
    for row in lines("serving-h200-2026-11-23-b.jsonl"):
        if (row["commit"], row["sampled_share"]) == ("522b563", 1.0):
            continue  # the page has the sampled run of a later commit
        first = f"{row['first_token_ms_median']:,.0f} and {row['first_token_ms_p99']:,.0f}"
        yield f"| {row['output_tokens_per_s']:,.0f} ("
        yield f"| {first}"
        yield f"| {row['update_ms_median']:.1f} and {row['update_ms_p99']:.1f}"
    (first,) = lines("first-token-h200-2026-11-22.json")
    yield f"first token after {first['cached_ms']:.2f} ms on an idle GPU"
    yield f"without the cache after {first['uncached_ms']:.2f}"
    yield f"({first['ratio']:.3f} times"


def half() -> Iterator[str]:
    """The last row of each kind counts."""
    found = {(r["target"], r["backend"], r["dtype"], r["cuda_graphs"]): r for r in lines("half-h200-2026-11-21.jsonl")}
    changed = {key: row["questions"] - row["identical"] for key, row in found.items()}
    pair = [(name, "flashinfer") for name in ("gsm-llama", "gsm-deepseek")]
    fp16, bf16 = ([changed[*one, dtype, False] for one in pair] for dtype in ("float16", "bfloat16"))
    assert (fp16, bf16) == ([1, 0], [0, 5])
    yield "fp16 1 (`gsm-llama`) and none (`gsm-deepseek`), bf16 none and 5"
    with_graphs = [[changed[*one, dtype, True] for one in pair] for dtype in ("float16", "bfloat16")]
    yield "fp16 changes {} and {}, bf16 {} and {}".format(*with_graphs[0], *with_graphs[1])
    assert [n for key, n in changed.items() if key[1] == "batch_invariant"] == [0, 0]
    found_rounds = rounds("round-h200-2026-11-21-invariant.jsonl")
    yield f"took {listed([ms(found_rounds[5, rows]) for rows in (1, 8, 32)])} ms at 1, 8 and 32 rows"
    (found,) = (line for line in _invariant_turns() if line[0] == ("llama-3.1-8b", 5))
    now, before = ([f"{np.median(each[name]):.2f}" for each in found[1][:3]] for name in ("now_ms", "before_ms"))
    yield f"and takes {now[0]}, {now[1]} and"
    yield f"{now[2]} since its matmuls"
    yield f"{listed(before)} by default"


def _invariant_turns() -> list[tuple[tuple[str, int], list[Any]]]:
    """Steps by shape and K, in the order of rows."""
    found: dict[tuple[str, int], list[Any]] = {}
    for line in [*lines("turns-h200-2026-12-01-invariant.jsonl"), *lines("turns-h200-2026-12-01-invariant-b.jsonl")]:
        if line["of"].startswith("a step of"):
            found.setdefault((line["shape"], line["drafts"]), []).append(line)
    return list(found.items())


def built_in() -> Iterator[str]:
    (found,) = lines("builtin_acceptance.json")
    others = (found[f"tau_{name}"] for name in ("prompt_lookup", "bigram", "zeroed_taps"))
    yield "| τ, 200 questions | {:.2f} (prompt lookup {:.2f}, bigram table {:.2f}, the head".format(
        found["tau"], *others
    )
    (speed,) = lines("builtin_speed.json")
    yield f"drafts | {speed['speed_up']['k0']:.2f}×"
    fast = [f"{speed['speed_up'][f'transformers_{kind}']:.2f}×" for kind in ("static", "dynamic")]
    yield f"static and dynamic cache | {listed(fast)} |"
    shards = lines("check_pair.jsonl")
    same = sum(shard["identical"]["batch_1"] for shard in shards)
    yield f"{same:,} of {sum(shard['questions'] for shard in shards):,}, equal to `generate` at batch 1 and 16"
    checked = sum(shard["draft_oracle"]["rounds"] for shard in shards)
    assert sum(shard["draft_oracle"]["wrong"] for shard in shards) == 0
    yield f"| {checked:,} of {checked:,} rounds"
    lookup = {(r["task"], r["drafts"]): r["speedup"] for r in lines("lookup-cpu-2026-11-28.json")[0]["results"]}
    one, six = "quoting, 1 row", "quoting, 6 rows"
    prompt, kinds = lookup[one, "transformers' prompt lookup"], ("lookup", "EAGLE-3", "EAGLE-3 and lookup")
    yield f"1 row: {lookup[one, 'lookup']:.2f} × plain rounds, transformers' prompt lookup {prompt:.2f} ×, the EAGLE"
    yield "6 rows: {:.2f}, the head {:.2f}, both {:.2f}".format(*(lookup[six, kind] for kind in kinds))


def readme() -> Iterator[str]:
    found = rounds("round-h200-2026-11-21-e.jsonl")
    for rows in (1, 32, 128):
        plain, fast = (found[k, rows]["tokens_per_s"] for k in (0, 5))
        yield f"{plain:,.0f} → {fast:,.0f} at {rows} row{'s' * (rows > 1)} ({fast / plain:.2f}×)"
    (speed,) = lines("builtin_speed.json")
    yield f"{speed['speed_up']['transformers_static']:.2f}× over `generate` with a static cache"
    shards = lines("check_pair.jsonl")
    same, questions = sum(s["identical"]["batch_1"] for s in shards), sum(s["questions"] for s in shards)
    yield f"{same:,} of {questions:,} GSM8K answers unchanged"


def exactness() -> Iterator[str]:
    for (shape, drafts), steps in _invariant_turns():
        ratios = ", ".join(f"{line['ratio']:.3f}" for line in steps)
        assert max(line["ratio"] for line in steps) < 1.0655 or shape.startswith("deepseek")
        what = f"K = {drafts}" if drafts else "a step without drafts"
        yield f"{what if shape == 'llama-3.1-8b' else 'to 32 rows'} | {ratios} |"
    longer = {
        (line["shape"][:5], line["of"]): line["ratio"] for line in lines("turns-h200-2026-12-01-invariant-b.jsonl")
    }
    yield f"4,096 tokens | {longer['llama', 'the first token of a prompt of 4096']:.3f} |"
    reading = [longer["qwen3", f"reading {rows} prompts of 256"] for rows in (1, 8, 32)]
    yield f"reading prompts of 256 tokens | {', '.join(f'{ratio:.3f}' for ratio in reading)} |"
    outcomes = {(line["type"], line["outcome"]) for line in lines("invariant-types-h200-2026-12-01.jsonl")}
    yield f"Tiny models of {sum(outcome == 'same' for _, outcome in outcomes)} types had the same bits"
    assert [name for name, outcome in outcomes if outcome == "DIFFERS"] == ["mamba2"]
    for line in lines("invariant-bits-h200-2026-12-01.jsonl"):
        assert (line["requests"], line["differing"]) == (200, 0)
    yield "Of 200 requests to each of these three mixtures, greedy and keyed, none had another token"
    price = {row["dtype"]: row["results"] for row in lines("invariant-cpu-2026-11-30.jsonl") if "results" in row}
    for dtype, results in price.items():
        more = [f"{100 * (each['ratio'] - 1):.0f}" for each in results]
        yield f"{dtype} takes {more[0]} and {more[1]} % longer at 1 row (K = 0 and 5), {more[2]} and {more[3]} % at 8"
    models = [row for row in lines("sweep-transformers-5.23.json")[0]["models"] if row["dtype"] == "float32"]
    counts = Counter(row["outcome"] for row in models)
    exact, limited = counts["exact"], counts["exact, limited"]
    yield f"Of {len(models)} cases in float32, {exact} give the model's own tokens and {limited} do"
    yield f"{counts['refused']} are refused by name, and {counts['not built']} cannot be built so small"
    kept = [
        f"{100 * row['ratio']:.0f}" for row in lines("sampling-cpu-2026-11-30.jsonl")[0]["results"] if row["top_p"] == 1
    ]
    yield f"keeps {listed(kept)} % of its tokens a round at temperatures 0.3, 0.7 and 1.0"


PAGES = {
    "docs/performance.md": (dense, sampled, hybrid, in_fp8, blocks, mixtures, serving, half, built_in, published),
    "README.md": (readme,),
    "docs/concepts/exactness.md": (exactness,),
}


@pytest.mark.parametrize(
    ("name", "part"), [pytest.param(n, p, id=p.__name__) for n, parts in PAGES.items() for p in parts]
)
def test_numbers_are_those_of_their_results(name: str, part: Any) -> None:
    text, found = page(name), list(part())
    assert len(found) >= 3 and [line for line in found if line not in text] == []


def test_sections_that_are_not_compared_are_listed() -> None:
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert set(re.findall(r"^## (.+)$", text, re.M)) == set(COMPARED)
    named = set(re.findall(r"`([\w.*-]+\.jsonl?)`", text))
    for other in ("README.md", "docs/concepts/exactness.md"):
        comments = re.findall(r"<!-- results: (.+?) -->", (ROOT / other).read_text("utf-8"))
        assert comments, other
        named |= {file for comment in comments for file in comment.split(", ")}
    assert [name for name in named if not name.startswith("-") and not list(RESULTS.glob(name))] == []
