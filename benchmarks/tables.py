"""docs/benchmarks.md: every committed result as a table.

python -m benchmarks.tables            # write the page
python -m benchmarks.tables --check    # fail where the page is not what the results say
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.document import usage
from benchmarks.evaluation_tables import DOCUMENTS, measured_by, percent, short

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
Line = dict[str, Any]

_INTRODUCTION = """# Benchmarks

Made by `python -m benchmarks.tables` from the files in `benchmarks/results/`; edit neither the page nor a number. Every
line of a results file names its versions, device and commit. How each is measured is the docstring of its script in
`benchmarks/`: bench_round (rounds), bench_serving (workloads of requests), bench_attention and bench_latent (kernels),
bench_backends (every attention backend on every batch of the test suite), bench_recurrence (kernels of recurrences),
bench_fp8 (matmuls with weights in FP8),
bench_cascade (rows that share their first pages, flat and in two levels), bench_host (the host's share of rounds, and
rounds with requests waiting),
check_pair and check_half (tokens and drafts against transformers and a head without cache), bench_builtin (the built-in
pair), sweep (every causal-LM type of transformers in miniature, against its own forward), sweep_parallel (the same, two
ranks against one); and `specdec eval` (acceptance, losslessness). Times of rounds are medians; *floor* is bytes over
bandwidth; *exposed* is the share of a round in which the GPU waits for the host. Acceptance is synthetic in rounds and
workloads (random weights), real everywhere else. What the numbers show is in [performance.md](performance.md).
"""


def rounds(lines: list[Line]) -> list[list[str]]:
    """Steps of the public engine at published shapes."""
    head = [
        "shape",
        "backend",
        "prompt",
        "K",
        "rows",
        "step ms",
        "floor ms",
        "× floor",
        "tokens/s",
        "exposed",
        "planned from",
    ]
    return [head] + [
        [
            line["shape"],
            line.get("backend", "flashinfer"),
            "–".join(map(str, dict.fromkeys(line["prompt"]))) if "prompt" in line else "",
            str(line["drafts"]),
            f"{line['rows']}{_kind(line)}",
            f"{line['step_ms_median']:.2f}",
            f"{line['floor_ms']:.2f}",
            f"{line['step_ms_median'] / line['floor_ms']:.2f}",
            f"{line['tokens_per_s']:,.0f}",
            percent(line.get("by_events", {}).get("exposed_host_share")),
            line.get("plan_from", "host"),
        ]
        for line in lines
    ]


def _kind(line: Line) -> str:
    """What is sampled of a round's rows, and whether its logits are sharp."""
    greedy = f", {percent(line['greedy_share'])} greedy" if line.get("greedy_share") else ""
    nats = f", {line['entropy']:g} nat" if line.get("entropy") else ""
    return f" sampled{greedy}{nats}" if line.get("sampled") else nats


def _load(line: Line) -> list[str]:
    """What a server was given, but for how much."""
    nats = f", {line['entropy']:g} nat" if line.get("entropy") else ""
    sampled, rate = f"{line['sampled_share']:.0%}{nats}", f"{line['rate']:g}/s" if line["rate"] else ""
    return [line["shape"], str(line["drafts"]), "–".join(map(str, line["prompt"])), sampled, rate]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def servings(lines: list[Line]) -> list[list[str]]:
    """Workloads: speed, time to first token, and time between updates and between tokens."""
    table = [["shape", "K", "prompt", "sampled", "rate", "new tokens", "requests, at once", "output tokens/s"]]
    table[0] += ["total tokens/s", "first token ms, p99", "update ms, p99", "token ms, p99"]
    for line in lines:
        times = [
            f"{_number(line[f'{name}_ms_median'], '.2f')}, {_number(line[f'{name}_ms_p99'], '.2f')}"
            for name in ("first_token", "update", "token")
        ]
        speed = [f"{line['output_tokens_per_s']:,.0f}", f"{line['total_tokens_per_s']:,.0f}"]
        size = ["–".join(map(str, line["output"])), f"{line['requests']}, {line['at_once']}"]
        table.append([*_load(line), *size, *speed, *times])
    return table


def interferences(lines: list[Line]) -> list[list[str]]:
    """Rows that decode while prompts arrive, against the same rows alone."""
    table = [["shape", "K", "prompt", "sampled", "rate", "rows", "arriving prompt", "prompts/s", "per"]]
    table[0] += ["median alone ms", "median beside ms", "p99 beside ms", "p99 beside over median alone"]
    for line in lines:
        size = [str(line["rows"]), str(line["arriving"][0]), f"{line['arrived_per_s']:.1f}"]
        for unit in ("update", "token"):
            pairs = ("alone", "median"), ("beside", "median"), ("beside", "p99")
            times = [_number(line[phase][f"{unit}_ms_{name}"], ".2f") for phase, name in pairs]
            table.append([*_load(line), *size, unit, *times, f"{line[f'{unit}_p99_over_alone']:.2f}"])
    return table


def kernels(lines: list[Line]) -> list[list[str]]:
    """One attention layer: the fastest route of every batch, and the others beside it."""
    table = [["kind", "rows", "query", "context", "cache", "run µs by route", "floor µs"]]
    for (kind, rows, query, context, cache), group in itertools.groupby(
        sorted(lines, key=_kernel_case), key=_kernel_case
    ):
        same = sorted(group, key=lambda line: line["run_us"])
        runs = ", ".join(f"{line['route']} {line['run_us']:.1f}" for line in same)
        table.append([kind, str(rows), str(query), str(context), cache, runs, short(same[0].get("floor_us"))])
    return table


def backends(lines: list[Line]) -> list[list[str]]:
    """Every backend on every batch of the suite; what one does not serve, by its own words."""
    table = [
        ["batch", "rows", "tokens", "keys", "backend", "plan µs", "run µs a layer", "total µs", "floor µs", "ratio"]
    ]
    for line in lines:
        size = [line["batch"], *(str(line[name]) for name in ("rows", "tokens", "keys"))]
        times = [_number(line.get(name), ".1f") for name in ("plan_us", "run_us", "total_us")]
        ratio = f"refused: {line['refused']}".replace("|", "/") if "refused" in line else f"{line['ratio']:.2f}"
        table.append([*size, line["backend"], *times, f"{line['floor_us']:.1f}", ratio])
    return table


def recurrences(lines: list[Line]) -> list[list[str]]:
    """Kernels of recurrences on rounds and prompts, or by tiling."""
    table = [["kernel", "", "rows", "tokens a row", "replayed", "µs a layer", "floor µs", "ratio"]]
    for line in lines:
        what = line.get("kind") or f"tiling {line['tiling']}"
        replayed = line["replay"] if "replay" in line else f"up to {line['most_replayed']}"
        sizes = [str(line["rows"]), str(line["tokens"]), str(replayed)]
        times = [f"{line[name]:.1f}" for name in ("run_us", "floor_us")]
        table.append([line["kernel"], what, *sizes, *times, f"{line['ratio']:.2f}"])
    return table


def parallel_rounds(lines: list[Line]) -> list[list[str]]:
    """Steps of a model on several GPUs, or of the same on one."""
    table = [["shape", "layers", "GPUs", "sums by", "K", "rows", "step ms", "× floor", "tokens/s"]]
    for line in lines:
        step = [f"{line['step_ms_median']:.2f}", f"{line['over_floor']:.2f}", f"{line['tokens_per_s']:,.0f}"]
        table.append([*_parallel_case(line), *step])
    return table


def parallel_exchanges(lines: list[Line]) -> list[list[str]]:
    """What the ranks of a round say to each other, alone, in ms."""
    table = [
        ["shape", "layers", "GPUs", "sums by", "K", "rows", "sums", "ms", "share", "NCCL ms", "gather", "broadcasts"]
    ]
    for line in lines:
        times = [f"{line[name]:.3f}" for name in ("sums_by_group_ms", "gather_ms", "broadcasts_ms")]
        sums = [str(line["sums"]), f"{line['sums_ms']:.3f}", percent(line["sums_share"])]
        table.append([*_parallel_case(line), *sums, *times])
    return table


def _parallel_case(line: Line) -> list[str]:
    sums = "" if line["tensor_parallel_size"] == 1 else line["parallel"]["collectives"]
    sizes = [str(line[name]) for name in ("layers", "tensor_parallel_size")]
    return [line["shape"], *sizes, sums, str(line["drafts"]), str(line["rows"])]


def fp8_matmuls(lines: list[Line]) -> list[list[str]]:
    """Matmuls with weights in FP8: the tiling in use, the fastest of a sweep, bfloat16 beside them."""
    table = [["rows x width", "tokens", "µs", "tiling", "best µs", "its tiling", "floor µs", "bf16 µs", "quantise µs"]]
    for line in lines:
        us, tiling = line["best"][0] if "best" in line else (None, None)
        best = [_number(us, ".1f"), _fp8_tiling(tiling) if tiling else ""]
        size = [f"{line['rows']} x {line['width']}", str(line["tokens"])]
        times = [f"{line[name]:.1f}" for name in ("floor_us", "bf16_us", "quantise_us")]
        table.append([*size, f"{line['us']:.1f}", _fp8_tiling(line["chosen"]), *best, *times])
    return table


def _fp8_tiling(tiling: Line) -> str:
    """Lines from before splits have neither these nor steps of several blocks."""
    first = "weight first" if tiling["weight_first"] else "weight last"
    parts = f", {tiling['splits']} splits" if tiling.get("splits", 1) > 1 else ""
    steps = f"{tiling['stages']} stages" + (f" of {tiling['at_once']} blocks" if tiling.get("at_once", 1) > 1 else "")
    return f"{tiling['tokens']} x {tiling['rows']}, {first}, {tiling['warps']} warps, {steps}{parts}"


def decode_kernels(lines: list[Line]) -> list[list[str]]:
    """Microseconds of each decode kernel, and the fastest of them."""
    names = list(dict.fromkeys(line["kernel"] for line in lines))
    table = [["head dim", "query heads a KV head", "rows", *names, "floor", "fastest"]]

    def case(line: Line) -> tuple[int, int, int]:
        return line["head_dim"], line["query_heads_a_kv_head"], line["rows"]

    for which, group in itertools.groupby(sorted(lines, key=case), key=case):
        found = {line["kernel"]: line for line in group}
        runs = {name: line["run_us"] for name, line in found.items() if "run_us" in line}
        times = [_number(runs.get(name), ".1f") or "refused" for name in names]
        fastest = min(runs, key=lambda name: runs[name]) if runs else ""
        table.append([*map(str, which), *times, f"{next(iter(found.values()))['floor_us']:.1f}", fastest])
    return table


def pairs(lines: list[Line]) -> list[list[str]]:
    """Tokens against transformers' generate and drafts against a head without cache, float32."""
    head = [
        "target",
        "K",
        "part",
        "questions",
        "equal, batch 1",
        "equal, batch 16",
        "draft rounds",
        "wrong",
        "wrong, planted",
    ]
    return [head] + [
        [
            line["target"],
            str(line["k"]),
            line["shard"],
            str(line["questions"]),
            str(line["identical"]["batch_1"]),
            str(line["identical"]["batch_16"]),
            str(line["draft_oracle"]["rounds"]),
            str(line["draft_oracle"]["wrong"]),
            str(line["draft_oracle"]["wrong_with_a_zeroed_slot"]),
        ]
        for line in lines
    ]


def halves(lines: list[Line]) -> list[list[str]]:
    """Half precision: answers that speculation leaves unchanged, and the near ties where it does not."""
    head = [
        "target",
        "backend",
        "graphs",
        "dtype",
        "K",
        "questions",
        "identical",
        "near ties",
        "τ",
        "τ, head without cache",
    ]
    return [head] + [
        [
            line["target"],
            line["backend"],
            "yes" if line["cuda_graphs"] else "no",
            line["dtype"],
            str(line["k"]),
            str(line["questions"]),
            str(line["identical"]),
            str(sum(d["near_tie"] for d in line["divergences"])),
            f"{line['draft_oracle']['tau_engine']:.3f}" if line.get("draft_oracle") else "",
            f"{line['draft_oracle']['tau_oracle']:.3f}" if line.get("draft_oracle") else "",
        ]
        for line in lines
    ]


def draft_samplings(documents: list[Line]) -> list[list[str]]:
    """Tau of sampled requests by how their drafts are chosen, with 95 % intervals."""
    table = [["questions", "K", "temperature", "top-p", "drafts", "tau", "95 %"]]
    for document in documents:
        common = [str(document["questions"]), str(document["drafts"])]
        for line in document["lines"]:
            setting = [short(line["temperature"]), short(line["top_p"]), line["draft_sampling"]]
            table.append([*common, *setting, f"{line['tau']:.3f}", f"{line['low']:.2f}-{line['high']:.2f}"])
    return table


def starts(lines: list[Line]) -> list[list[str]]:
    """Seconds of a cold and of a warm start, step by step, and the longest round that came after it."""
    table = [["shape", "step", "cold, s", "warm, s"]]
    for line in lines:
        both = line["cold"], line["warm"]
        steps = dict.fromkeys(name for start in both for name in start["steps"])
        rows = [(name, [start["steps"].get(name) for start in both]) for name in steps]
        for key, name in (("first_greedy_s", "first greedy generate"), ("first_sampled_s", "first sampled generate")):
            rows.append((name, [start[key] for start in both]))
        rows.append(("from the call to there", [start["start_s"] for start in both]))
        longest = [start["workload_first"]["longest_ms"][0] / 1e3 for start in both]
        rows.append(("longest round of a first workload", longest))
        shape = f"{line['shape']}, K={line['drafts']}, {line['rows']} rows"
        table += [[shape, name, *("" if s is None else f"{s:.2f}" for s in values)] for name, values in rows]
    return table


def sweep(document: Line) -> list[list[str]]:
    """Every causal-LM type: how many came to each outcome, and each one that is neither exact nor refused."""
    table = [["dtype", "outcome", "models", "which, and why"]]
    for dtype, found in document["counts"].items():
        for outcome, count in found.items():
            same = [m for m in document["models"] if (m["dtype"], m["outcome"]) == (dtype, outcome)]
            named = [] if outcome in _AS_IT_SHOULD else [f"{m['name']}: {m['reason']}" for m in same]
            table.append([dtype, outcome, str(count), "; ".join(named).replace("|", "/")])
    return table


def parallel_sweep(document: Line) -> list[list[str]]:
    """Every causal-LM type among two ranks: how many came to each outcome, and each that is refused."""
    table = [["outcome", "models", "which, and why"]]
    for outcome, count in document["counts"].items():
        same = [m for m in document["models"] if m["outcome"] == outcome]
        named = [f"{m['case']}: {m['reason']}" if "reason" in m else f"{m['case']}: {m['error']:.1e}" for m in same]
        listed = [] if outcome == "right" else named
        table.append([outcome, str(count), "; ".join(listed).replace("|", "/")])
    return table


def queues(lines: list[Line]) -> list[list[str]]:
    """Whole rounds of an engine with requests waiting, in CPU time."""
    table = [["waiting", "rows", "ended per round", "round µs, median", "p99", "abort µs per request"]]
    keys = ("waiting", "rows", "ended_per_round", "p50_us", "p99_us", "abort_us_per_request")
    return table + [[f"{result[key]:,}" for key in keys] for line in lines for result in line["results"]]


def plain(lines: list[Line]) -> list[list[str]]:
    """Any other line: what it measured, name by name."""
    values = [(key, value) for line in lines for key, value in line.items() if key not in _PROVENANCE]
    return [["", ""]] + [[key, short(value)] for key, value in values]


_PROVENANCE = (
    *("python", "numpy", "torch", "transformers", "machine", "commit", "gpu", "flashinfer", "nvmath"),
    *("benchmark", "device", "seconds", "start_s", "threads"),
)
_LINES: dict[str, Callable[[list[Line]], list[list[str]]]] = {
    "round": rounds,
    "serving": servings,
    "interference": interferences,
    "attention": kernels,
    "backends": backends,
    "decode_kernels": decode_kernels,
    "fp8": fp8_matmuls,
    "parallel": parallel_rounds,
    "parallel exchanges": parallel_exchanges,
    "recurrence": recurrences,
    "recurrence_tilings": recurrences,
    "check_pair": pairs,
    "check_half": halves,
    "draft_sampling": draft_samplings,
    "start": starts,
    "host_queue": queues,
}
_AS_IT_SHOULD = ("exact", "near ties", "refused")


def page(results: Path = RESULTS) -> str:
    """The whole page, one section per results file in the order of their names."""
    sections = [section(path) for path in sorted(results.iterdir()) if path.suffix in (".json", ".jsonl")]
    return "\n".join([_INTRODUCTION, *sections])


def section(path: Path) -> str:
    """One results file: where it was measured, and its tables."""
    text = path.read_text("utf-8")
    whole = json.loads(text) if path.suffix == ".json" else {}
    if "schema" in whole:
        made = DOCUMENTS.get(whole["schema"])
        return f"## {path.name}\n\n{measured_by(whole)}\n\n{_table(made(whole) if made else plain([whole]))}"
    whole |= whole.get("provenance", {}) if whole.get("benchmark") else {}
    if whole.get("benchmark") == "sweep":
        return f"## {path.name}\n\n{_measured_on(whole)}\n\n{_table(sweep(whole))}"
    if whole.get("benchmark") == "parallel sweep":
        return f"## {path.name}\n\n{_measured_on(whole)}\n\n{_table(parallel_sweep(whole))}"
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in map(json.loads, text.splitlines()):
        groups.setdefault((line["benchmark"], _measured_on(line)), []).append(line)
    parts = [f"{facts}\n\n{_table(_LINES.get(kind, plain)(group))}" for (kind, facts), group in groups.items()]
    return f"## {path.name}\n\n" + "\n".join(parts)


def _measured_on(line: Line) -> str:
    extras = {"FlashInfer": line.get("flashinfer"), "nvmath": line.get("nvmath")}
    found = "".join(f", {name} {version}" for name, version in extras.items() if version)
    device = line.get("gpu") or line.get("device") or f"CPU ({line.get('machine', '')})"
    software = f"torch {line['torch']}, transformers {line['transformers']}{found}"
    return f"{device}; {software}; commit {str(line['commit'])[:7]}"


def _kernel_case(line: Line) -> tuple[str, int, int, int, str]:
    return line["kind"], line["rows"], line["query"], line["context"], line["cache"]


def _table(rows: Iterable[list[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body]) + "\n"


@click.command(help=usage(__doc__))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the page differs.")
def main(check: bool) -> None:
    """Write docs/benchmarks.md, or check it."""
    text = page()
    if not check:
        PAGE.write_text(text, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != text:
        click.echo(
            "docs/benchmarks.md is not what benchmarks/results/ says; run: python -m benchmarks.tables", err=True
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
