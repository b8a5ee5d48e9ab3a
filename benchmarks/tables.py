"""docs/benchmarks.md: every committed result as a table.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.document import md_table, usage
from benchmarks.evaluation_tables import DOCUMENTS, measured_by, percent, short

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
Line = dict[str, Any]
Rows = list[list[str]]

_INTRODUCTION = """# Benchmarks

Made by `python -m benchmarks.tables` from the files in `benchmarks/results/`; edit neither the page nor a number. Every
line of a results file names its versions, device and commit. How each is measured is the docstring of its script in
`benchmarks/`: bench_round (rounds), bench_serving (workloads of requests), bench_start (starts), bench_first_token
(starts on a CPU, and transformers'), bench_cpu (a model on a CPU beside transformers and llama.cpp), bench_parallel
(several GPUs), bench_mixtures and bench_experts (mixtures of experts), offline/turns (two checkouts in turn),
bench_draft_vocab and bench_draft_round (fewer tokens to draft on), bench_sampling (both rules for sampled tokens),
bench_host (rounds with requests waiting), check_pair (tokens and drafts against transformers and a head
without cache), bench_builtin (the built-in pair against `generate`), sweep (every causal-LM type of transformers in
miniature, against its own forward);
and `specdec eval` (acceptance, losslessness). Times of rounds are medians; *floor* is bytes over bandwidth; *exposed*
is the share of a round in which the GPU waits for the host. Acceptance is synthetic in rounds and workloads (random
weights), real everywhere else. What the numbers show is in [performance.md](performance.md).

One-off comparisons were made by scripts that are gone; commit 62c2095 has them: bench_cascade (rows that share their
first pages, flat and in two levels), bench_fp8 (matmuls with weights in FP8), bench_draft_sampling (how drafts of
sampled requests are chosen), bench_half_batches (sums of one half-batch behind matmuls of the other), sweep_parallel
(the sweep, two ranks against one), simulate_serving (the scheduler over a clock), `bench_round --plan-from device`
(plans from device tensors), `bench_serving --against` (another checkout in the same run) and
`bench_recurrence --part tilings`.
"""

_LOAD = {
    "shape": "{shape}",
    "K": "{drafts}",
    "prompt": "{prompt!r}{behind}",
    "sampled": "{sampled_share:.0%}{nats}",
    "rate": "{per_s}",
}
_PARALLEL = {
    "shape": "{shape}",
    "layers": "{layers}",
    "GPUs": "{tensor_parallel_size}",
    "sums by": "{sums_by}",
    "K": "{drafts}",
    "rows": "{rows}",
}
_RECURRENCE = {
    "kernel": "{kernel}",
    "": "{what}",
    "rows": "{rows}",
    "tokens a row": "{tokens}",
    "replayed": "{replayed}",
    "µs a layer": "{run_us:.1f}",
    "floor µs": "{floor_us:.1f}",
    "ratio": "{ratio:.2f}",
}
COLUMNS: dict[str, dict[str, str]] = {
    "round": {
        "shape": "{shape}",
        "backend": "{backend}",
        "prompt": "{prompt!r}",
        "K": "{drafts}",
        "rows": "{rows}{kind}",
        "step ms": "{step_ms_median:.2f}",
        "floor ms": "{floor_ms:.2f}",
        "× floor": "{over:.2f}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "exposed": "{by_events[exposed_host_share]:.1%}",
        "planned from": "{plan_from}",
    },
    "serving": _LOAD
    | {
        "new tokens": "{output!r}",
        "requests, at once": "{requests}, {at_once}",
        "output tokens/s": "{output_tokens_per_s:,.0f}",
        "total tokens/s": "{total_tokens_per_s:,.0f}",
        "first token ms, p99": "{first_token_ms_median:.2f}, {first_token_ms_p99:.2f}",
        "update ms, p99": "{update_ms_median:.2f}, {update_ms_p99:.2f}",
        "token ms, p99": "{token_ms_median:.2f}, {token_ms_p99:.2f}",
    },
    "interference": _LOAD
    | {
        "rows": "{rows}",
        "arriving prompt": "{arriving[0]}",
        "prompts/s": "{arrived_per_s:.1f}",
        "per": "{per}",
        "median alone ms": "{alone_ms:.2f}",
        "median beside ms": "{beside_ms:.2f}",
        "p99 beside ms": "{p99_ms:.2f}",
        "p99 beside over median alone": "{p99_over_alone:.2f}",
    },
    "parallel": _PARALLEL
    | {"step ms": "{step_ms_median:.2f}", "× floor": "{over_floor:.2f}", "tokens/s": "{tokens_per_s:,.0f}"},
    "parallel exchanges": _PARALLEL
    | {
        "sums": "{sums}",
        "ms": "{sums_ms:.3f}",
        "share": "{sums_share:.1%}",
        "NCCL ms": "{sums_by_group_ms:.3f}",
        "gather": "{gather_ms:.3f}",
        "broadcasts": "{broadcasts_ms:.3f}",
    },
    "recurrence": _RECURRENCE,
    "recurrence_tilings": _RECURRENCE,
    "fp8": {
        "rows x width": "{rows} x {width}",
        "tokens": "{tokens}",
        "µs": "{us:.1f}",
        "tiling": "{tiling}",
        "best µs": "{best_us:.1f}",
        "its tiling": "{best_tiling}",
        "floor µs": "{floor_us:.1f}",
        "bf16 µs": "{bf16_us:.1f}",
        "quantise µs": "{quantise_us:.1f}",
    },
    "check_pair": {
        "target": "{target}",
        "K": "{k}",
        "part": "{shard}",
        "questions": "{questions}",
        "equal, batch 1": "{identical[batch_1]}",
        "equal, batch 16": "{identical[batch_16]}",
        "draft rounds": "{draft_oracle[rounds]}",
        "wrong": "{draft_oracle[wrong]}",
        "wrong, planted": "{draft_oracle[wrong_with_a_zeroed_slot]}",
    },
    "check_half": {
        "target": "{target}",
        "backend": "{backend}",
        "graphs": "{with_graphs}",
        "dtype": "{dtype}",
        "K": "{k}",
        "questions": "{questions}",
        "identical": "{identical}",
        "near ties": "{near_ties}",
        "τ": "{draft_oracle[tau_engine]:.3f}",
        "τ, head without cache": "{draft_oracle[tau_oracle]:.3f}",
    },
    "draft_sampling": {
        "questions": "{questions}",
        "K": "{drafts}",
        "temperature": "{temperature:.4g}",
        "top-p": "{top_p:.4g}",
        "drafts": "{draft_sampling}",
        "tau": "{tau:.3f}",
        "95 %": "{low:.2f}-{high:.2f}",
    },
    "sampling": {
        "target": "{target}",
        "questions": "{questions}",
        "K": "{K}",
        "temperature": "{temperature:.4g}",
        "top-p": "{top_p:.4g}",
        "tau, rejection": "{tau_rejection:.3f}",
        "tau, keyed": "{tau_keyed:.3f}",
        "keyed over rejection": "{ratio:.3f}",
        "95 %": "{low:.3f}-{high:.3f}",
    },
    "draft_vocab": {
        "K": "{drafts}",
        "tokens": "{tokens}",
        "size": "{size:,}",
        "drafted on": "{drafted_on:,}",
        "tau": "{tau:.3f}",
        "tau lost": "{tau_loss:.1%}",
    },
    "start": {
        "shape": "{shape}, K={drafts}, {rows} rows",
        "step": "{step}",
        "cold, s": "{c:.2f}",
        "warm, s": "{w:.2f}",
    },
    "first_token": {
        "model": "{model}, {dtype}",
        "start": "{arm}",
        "wall s": "{wall_s:.2f}",
        "CPU s": "{cpu_s:.2f}",
        "of these importing": "{import_cpu_s:.2f}",
        "peak MiB": "{peak_mib:,.0f}",
        "over transformers (wall, CPU, peak)": "{wall_s_over:.2f}, {cpu_s_over:.2f}, {peak_mib_over:.2f}",
    },
    "cpu": {
        "model": "{model}, {dtype}",
        "threads": "{threads}",
        "prompts": "{category}",
        "arm": "{arm}",
        "tokens a forward": "{tokens_per_round:.2f}",
        "wall s": "{wall_s:.2f}",
        "CPU s": "{cpu_s:.2f}",
        "tokens/s": "{tokens_per_s:.1f}",
        "equal answers": "{same}",
        "over transformers (wall, CPU)": "{over_transformers}",
        "over K = 0": "{over_K0}",
        "over llama.cpp": "{over_llama}",
    },
    "host_queue": {
        "waiting": "{waiting:,}",
        "rows": "{rows:,}",
        "ended per round": "{ended_per_round:,}",
        "round µs, median": "{p50_us:,}",
        "p99": "{p99_us:,}",
        "abort µs per request": "{abort_us_per_request:,}",
    },
    "grammars": {
        "schema": "{schema}",
        "K": "{drafts}",
        "rows": "{rows}",
        "with a grammar": "{grammar}",
        "step ms": "{step_ms_median:.2f}",
        "mean": "{step_ms_mean:.2f}",
        "× nothing": "{over_nothing:.3f}",
        "filling ms, median": "{fill_ms_median:.2f}",
        "p99": "{fill_ms_p99:.1f}",
        "of legal drafts": "{legal_drafts_fill_ms_median:.2f}",
    },
    "grammar_drafts": {
        "drafts": "{drafts}",
        "white space": "{white_space}",
        "τ": "{tau:.2f}",
        "tokens/s": "{tokens_per_s:,.0f}",
    },
    "mixtures": {
        "target": "{shape}",
        "layers": "{layers}",
        "weights": "{weights}",
        "K": "{drafts}",
        "sampled": "{sampled}",
        "rows": "{rows}",
        "start s": "{grouped_start_s:.0f}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "step ms": "{grouped_ms:.2f}",
        "floor": "{floor_ms:.2f}",
        "over floor": "{over_floor:.2f}",
        "paired": "{paired_ms:.2f}",
        "× paired": "{over:.3f}",
        "experts a layer": "{experts_a_layer:.0f}",
    },
    "experts": {
        "experts of": "{shape}",
        "tokens": "{tokens:,}",
        "distinct": "{experts:.0f}",
        "µs": "{routed_us:,.0f}",
        "grouped_mm": "{grouped_mm_us:,.0f}",
        "least": "{least_us:,.0f}",
        "× least": "{over_least:.2f}",
    },
    "turns": {
        "target": "{shape}",
        "K": "{drafts}",
        "of": "{of}",
        "before": "{before}",
        "ms before": "{before_ms}",
        "ms now": "{now_ms}",
        "ratio": "{ratio:.3f}",
        "from": "{interval[0]:.3f}",
        "to": "{interval[1]:.3f}",
    },
    "lookup": {
        "task": "{task}",
        "drafts": "{drafts}",
        "tokens/s": "{tokens_per_s:,}",
        "speed-up": "{speedup:.2f}",
        "tokens a round": "{tokens_per_round:.2f}",
    },
    "identity": {
        "dtype": "{dtype}",
        "linears": "{linears}",
        "draft": "{draft}",
        "rows": "{batch}",
        "against": "{against}",
        "prompts": "{prompts}",
        "identical": "{identical}",
        "equal tokens": "{tokens_equal:,}",
        "widest gap, float32": "{widest[float32]}",
        "bfloat16": "{widest[bfloat16]}",
    },
}
"""By `benchmark` of a line: the table's columns, each with the form of its cells. What a line lacks is left out."""


class _Cells(string.Formatter):
    """Forms of cells: a field that is missing, or None, is empty; `!r` writes a range of numbers.

    >>> _Cells().format("{a[b]:.1f} {a[c]:.1f}, {n!r}", a={"b": 2}, n=[64, 1024])
    '2.0 , 64–1024'
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return value if conversion is None or value is None else "–".join(map(str, dict.fromkeys(value)))

    def format_field(self, value: Any, format_spec: str) -> Any:
        return "" if value is None else super().format_field(value, format_spec)


def _nats(line: Line) -> str:
    return f", {line['entropy']:g} nat" if line.get("entropy") else ""


def _round(line: Line) -> Iterable[Line]:
    greedy = f", {percent(line['greedy_share'])} greedy" if line.get("greedy_share") else ""
    kind = f" sampled{greedy}{_nats(line)}" if line.get("sampled") else _nats(line)
    kind += f" ({line['asks']})" if line.get("asks") else ""
    common = {"backend": "flashinfer", "plan_from": "host"}
    yield common | line | {"kind": kind, "over": line["step_ms_median"] / line["floor_ms"]}


def _load(line: Line) -> Line:
    cached = "cached" if line.get("prefix_caching") else "not cached"
    behind = f" behind {line['shared_prefix']} {cached}" if line.get("shared_prefix") else ""
    return line | {"nats": _nats(line), "per_s": f"{line['rate']:g}/s" if line["rate"] else "", "behind": behind}


def _interference(line: Line) -> Iterable[Line]:
    for unit in ("update", "token"):
        names = {"alone_ms": ("alone", "median"), "beside_ms": ("beside", "median"), "p99_ms": ("beside", "p99")}
        times = {name: line[phase][f"{unit}_ms_{of}"] for name, (phase, of) in names.items()}
        yield _load(line) | times | {"per": unit, "p99_over_alone": line[f"{unit}_p99_over_alone"]}


def _parallel(line: Line) -> Iterable[Line]:
    yield line | {"sums_by": "" if line["tensor_parallel_size"] == 1 else line["parallel"]["collectives"]}


def _recurrence(line: Line) -> Iterable[Line]:
    replayed = line["replay"] if "replay" in line else f"up to {line['most_replayed']}"
    yield line | {"what": line.get("kind") or f"tiling {line['tiling']}", "replayed": replayed}


def _fp8(line: Line) -> Iterable[Line]:
    us, tiling = line["best"][0] if "best" in line else (None, None)
    best = {"best_us": us, "best_tiling": None if tiling is None else _fp8_tiling(tiling)}
    yield line | {"tiling": _fp8_tiling(line["chosen"])} | best


def _fp8_tiling(tiling: Line) -> str:
    """Lines from before splits have neither these nor steps of several blocks."""
    first = "weight first" if tiling["weight_first"] else "weight last"
    parts = f", {tiling['splits']} splits" if tiling.get("splits", 1) > 1 else ""
    steps = f"{tiling['stages']} stages" + (f" of {tiling['at_once']} blocks" if tiling.get("at_once", 1) > 1 else "")
    return f"{tiling['tokens']} x {tiling['rows']}, {first}, {tiling['warps']} warps, {steps}{parts}"


def _half(line: Line) -> Iterable[Line]:
    ties = sum(each["near_tie"] for each in line["divergences"])
    yield line | {"with_graphs": short(line["cuda_graphs"]), "near_ties": ties}


def _mixtures(line: Line) -> Iterable[Line]:
    served, over = line.get("grouped_tokens_per_s"), line.get("over_paired", line.get("times_paired"))
    yield line | {"tokens_per_s": served and median(served), "over": over}


def _cpu(line: Line) -> Iterable[Line]:
    """Ratios of wall and of CPU seconds stand in one cell. Lines of before 30 November have them apart."""
    for each in line["results"]:
        apart = {"transformers": "to_transformers", "K0": "to_packed_K0", "llama": ""}
        pairs = {to: each.get(f"to_{to}") for to in apart}
        pairs |= {to: [each[old], each[f"cpu_{old}"]] for to, old in apart.items() if f"cpu_{old}" in each}
        same = f"{each['equal']} of {each['answers']}" if "equal" in each else ""
        over = {f"over_{to}": ", ".join(f"{ratio:.2f}" for ratio in found or ()) for to, found in pairs.items()}
        yield line | each | over | {"same": same}


def _turns(line: Line) -> Iterable[Line]:
    of = line["of"] if "of" in line else f"{line['rows']} rows at {line.get('temperature', 0.0)}"
    yield line | {"of": of} | {key: f"{median(line[key]):.2f}" for key in ("before_ms", "now_ms")}


def _start(line: Line) -> Iterable[Line]:
    """Step by step, then the longest round that came after the start."""
    both = line["cold"], line["warm"]
    for name in dict.fromkeys(name for start in both for name in start["steps"]):
        cold, warm = (start["steps"].get(name) for start in both)
        yield line | {"step": name, "c": cold, "w": warm}
    spans = {"first_greedy_s": "first greedy generate", "first_sampled_s": "first sampled generate"}
    for key, name in (spans | {"start_s": "from the call to there"}).items():
        yield line | {"step": name, "c": both[0][key], "w": both[1][key]}
    cold, warm = (start["workload_first"]["longest_ms"][0] / 1e3 for start in both)
    yield line | {"step": "longest round of a first workload", "c": cold, "w": warm}


_CELLS: dict[str, Callable[[Line], Iterable[Line]]] = {
    "round": _round,
    "serving": lambda line: [_load(line)],
    "interference": _interference,
    "parallel": _parallel,
    "parallel exchanges": _parallel,
    "recurrence": _recurrence,
    "recurrence_tilings": _recurrence,
    "fp8": _fp8,
    "check_half": _half,
    "draft_sampling": lambda line: [line | each for each in line["lines"]],
    "draft_vocab": lambda line: [line | each for each in line["lines"]],
    "start": _start,
    "mixtures": _mixtures,
    "turns": _turns,
    "host_queue": lambda line: line["results"],
    "lookup": lambda line: line["results"],
    "sampling": lambda line: [line | each for each in line["results"]],
    "first_token": lambda line: [line | each for each in line["results"]],
    "cpu": _cpu,
    "grammar_drafts": lambda line: line["results"],
}
"""What the columns of a kind name beside a line's own values; of some kinds a line makes several rows."""


def rows_of(kind: str, lines: list[Line]) -> Rows:
    """The table of a kind of line. One without columns is shown name by name."""
    if kind not in COLUMNS:
        values = [(key, value) for line in lines for key, value in line.items() if key not in _PROVENANCE]
        return [["", ""]] + [[key, short(value)] for key, value in values]
    columns, cells = COLUMNS[kind], _Cells()
    found = [row for line in lines for row in _CELLS.get(kind, lambda line: [line])(line)]
    return [list(columns), *([cells.vformat(form, (), row) for form in columns.values()] for row in found)]


def sweep(document: Line) -> Rows:
    """Every causal-LM type: how many came to each outcome, and each one that is neither exact nor refused."""
    table = [["dtype", "outcome", "models", "which, and why"]]
    for dtype, found in document["counts"].items():
        for outcome, count in found.items():
            same = [m for m in document["models"] if (m["dtype"], m["outcome"]) == (dtype, outcome)]
            named = [] if outcome in _AS_IT_SHOULD else [f"{m['name']}: {m['reason']}" for m in same]
            table.append([dtype, outcome, str(count), "; ".join(named).replace("|", "/")])
    return table


def parallel_sweep(document: Line) -> Rows:
    """Every causal-LM type among two ranks: how many came to each outcome, and each that is refused."""
    table = [["outcome", "models", "which, and why"]]
    for outcome, count in document["counts"].items():
        same = [m for m in document["models"] if m["outcome"] == outcome != "right"]
        named = [f"{m['case']}: {m['reason']}" if "reason" in m else f"{m['case']}: {m['error']:.1e}" for m in same]
        table.append([outcome, str(count), "; ".join(named).replace("|", "/")])
    return table


_PROVENANCE = (
    *("python", "numpy", "torch", "transformers", "machine", "commit", "gpu", "flashinfer", "nvmath"),
    *("benchmark", "device", "seconds", "start_s", "threads"),
)
_WHOLE = {"sweep": sweep, "parallel sweep": parallel_sweep}
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
        return f"## {path.name}\n\n{measured_by(whole)}\n\n{md_table(made(whole) if made else rows_of('', [whole]))}"
    whole |= whole.get("provenance", {}) if whole.get("benchmark") else {}
    if whole.get("benchmark") in _WHOLE:
        return f"## {path.name}\n\n{_measured_on(whole)}\n\n{md_table(_WHOLE[whole['benchmark']](whole))}"
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in map(json.loads, text.splitlines()):
        groups.setdefault((line["benchmark"], _measured_on(line)), []).append(line)
    parts = [f"{facts}\n\n{md_table(rows_of(kind, group))}" for (kind, facts), group in groups.items()]
    return f"## {path.name}\n\n" + "\n".join(parts)


def _measured_on(line: Line) -> str:
    extras = {"FlashInfer": line.get("flashinfer"), "nvmath": line.get("nvmath")}
    found = "".join(f", {name} {version}" for name, version in extras.items() if version)
    device = line.get("gpu") or line.get("device") or f"CPU ({line.get('machine', '')})"
    software = f"torch {line['torch']}, transformers {line['transformers']}{found}"
    return f"{device}; {software}; commit {str(line['commit'])[:7]}"


@click.command(help=usage(__doc__))
def main() -> None:
    """Write docs/benchmarks.md."""
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
