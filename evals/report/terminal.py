"""An acceptance document in words and as tables on the terminal, and the progress of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from drafters.training.lines_of_progress import LinesOfProgress
from evals.acceptance.metrics import METRICS, Metric
from evals.acceptance.summary import FEW, Json
from evals.runs.answers import Answer
from specdec.requests.stats import pool


def template(name: str, **settings: Any) -> Template:
    """The page or text of this name, as "lossless.txt". settings: of jinja's environment."""
    made = Environment(
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=PackageLoader("evals", "report/templates"),
        **settings,
    )
    return made.get_template(f"{name}.j2")


def print_text(console: Console, name: str, **values: Any) -> None:
    """Print the text of this name; values have no markup."""
    text = template(f"{name}.txt", finalize=lambda value: escape(str(value))).render(values)
    console.print(text, end="", highlight=False, soft_wrap=True)


def headline(document: Json) -> str:
    """The result in a sentence: the speed-up and whether answers changed; of a comparison, the difference."""
    drafting = [arm for arm in document["arms"] if arm["k"] and arm["name"] not in document["not_measured"]]
    if not drafting:
        return "Nothing measured: no draft was verified."
    if "differences" in document:
        return _difference(document)
    known = [arm for arm in drafting if arm["timing"]["speedup"]["estimate"] is not None]
    if not known:
        return "No speed-up measured: there were no times to compare."
    best = max(known, key=lambda arm: float(arm["timing"]["speedup"]["estimate"]))
    return f"{best['name']}: {_speed(best['timing']['speedup'], best['questions'])}; {_answers(document, best)}."


def cautions(document: Json) -> list[str]:
    """Warnings about the intervals; [] where there are none."""
    found = []
    questions = document["arms"][0]["questions"]
    if questions < 2:
        found.append("One question: numbers have no interval. Ask more of them.")
    elif questions < FEW:
        found.append(f"{questions} questions: intervals are Student's t, and wide. Ask {FEW} or more.")
    if document.get("timing", {}).get("runs") == 1:
        found.append(
            "Speeds were measured in one run: their intervals have the scatter of questions, not that of the machine "
            "from run to run, which can be larger. Give --repeats 5."
        )
    return found


def _speed(value: Json, questions: int) -> str:
    estimate, _, span = show(value, 2, questions).partition(" ")
    span = f" {span}" if span else ""
    if span and value["low"] <= 1 <= value["high"]:
        return f"no clear speed-up, {estimate} × the target alone's speed{span}"
    return f"{estimate} × {'faster than' if value['estimate'] > 1 else 'the speed of'} the target alone{span}"


def _answers(document: Json, arm: Json) -> str:
    found = arm["identical_to_target_alone"]
    same = found["identical"]
    total = found["questions"]
    if same == total:
        return f"answers unchanged ({same} of {total} equal)"
    changed = f"{total - same} of {total} answers differ from the target alone's"
    if document["provenance"]["settings"]["asking"]["params"]["temperature"]:
        return f"{changed}, as sampled ones do (`specdec eval lossless` tests their distribution)"
    return f"{changed} (`specdec eval lossless` says whether by more than rounding)"


def _difference(document: Json) -> str:
    left, right = (arm["name"] for arm in document["arms"])
    tau = document["differences"]["metrics"]["tau"]
    speed = document["differences"]["timing"]["speed_ratio"]
    if tau["estimate"] is None or speed["estimate"] is None:
        return f"{right} against {left}: not everything could be measured."
    is_clear = tau["low"] is not None and not tau["low"] <= 0 <= tau["high"]
    more = f"{abs(tau['estimate']):.2f} tokens a round {'more' if tau['estimate'] > 0 else 'less'}"
    kept = f"keeps {more}" if is_clear else "keeps no clearly different number of tokens a round"
    return f"{right} {kept} than {left}, at {speed['estimate']:.2f} × its speed."


MAIN = ("tau", "tau_requests", "tau_tokens", "acceptance_rate", "speedup", "speedup_decode", "tokens_per_s")
"""Metrics that are shown first. The others count the same rounds as other tools do."""
OTHERS = "As other tools count"


def metric_parts() -> list[tuple[str, list[Metric]]]:
    """(title, metrics): the main ones, without a title, and the others."""
    others = [metric for key, metric in METRICS.items() if key not in MAIN]
    return [("", [METRICS[key] for key in MAIN]), (OTHERS, others)]


def decimals(value: float, questions: int, most: int = 3) -> int:
    """Decimals worth showing: two digits in all where few questions make the intervals wide.

    >>> decimals(3.741, 6), decimals(0.951, 6), decimals(110.0, 6, most=1), decimals(3.741, 80)
    (1, 2, 0, 3)
    """
    return min(most, max(2 - len(str(int(abs(value)))), 0) if abs(value) >= 1 else 2) if questions < FEW else most


POSITIONS = ("conditional", "unconditional", "per_position_vllm")
"""The kinds of acceptance at a draft position, in the order in which they are shown."""


class RunProgress(LinesOfProgress):
    """A progress bar: questions done, τ so far, time left. Use as a context manager; call with finished answers."""

    def __init__(self, console: Console, total: int, arms: int) -> None:
        columns = ("questions", BarColumn(), MofNCompleteColumn(), "τ {task.fields[tau]}", TimeElapsedColumn())
        super().__init__(*columns, TimeRemainingColumn(), console=console)
        self._questions = self.add_task("questions", total=total, tau="-")
        self._arms = arms
        self._answers = self._emitted = self._rounds = 0

    def __call__(self, answers: Sequence[Answer]) -> None:
        """Count answers; τ pools the configurations that draft."""
        self._answers += len(answers)
        for answer in answers:
            stats = pool(answer.rounds)
            if stats.drafted:
                self._emitted += stats.emitted
                self._rounds += stats.rounds
        tau = f"{self._emitted / self._rounds:.3f}" if self._rounds else "-"
        self.update(self._questions, completed=self._answers // self._arms, tau=tau)


def print_acceptance(console: Console, document: Json, explain: bool) -> None:
    """Print the document. explain: with the sentence that defines each number."""
    arms = document["arms"]
    questions = arms[0]["questions"]
    console.print(f"\n[bold]{headline(document)}[/bold]")
    for part, metrics in metric_parts():
        table = _table("", *(arm["name"] for arm in arms))
        for metric in metrics:
            table.add_row(metric.label, *(_shown(metric, arm) for arm in arms))
        _print_table(console, part or f"{questions} questions", table)
    for title, key in groupings(arms[0]):
        _print_table(console, title, _group_table(arms, key))
    _print_table(
        console,
        "acceptance per draft position; below each other: conditional, unconditional, as vLLM",
        _position_table(arms),
    )
    if "timing" in document:
        prediction = document["timing"]["prediction"]
        title = "predicted speed-up, decode only (* beyond what was measured)"
        if prediction["table"]:
            table = _table("K", *(f"batch {size}" for size in prediction["round_seconds"]))
            for k in sorted({cell["k"] for cell in prediction["table"]}):
                row = [cell for cell in prediction["table"] if cell["k"] == k]
                table.add_row(str(k), *(predicted(cell, questions) for cell in row))
            _print_table(console, title, table)
        for text in advice(document):
            console.print(text)
    if "differences" in document:
        title = f"{arms[1]['name']} less {arms[0]['name']}, paired"
        _print_table(console, title, _difference_table(document["differences"], questions))
    definitions = document["definitions"].items() if explain else ()
    named = {METRICS[key].label if key in METRICS else key.replace("_", " "): text for key, text in definitions}
    print_text(console, "acceptance", document=document, cautions=cautions(document), definitions=named)


def _print_table(console: Console, title: str, table: Table) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


def groupings(arm: Json) -> list[tuple[str, str]]:
    """(title, key) of the groupings worth showing: tasks, and categories where they are not the same groups."""
    shown = [("by task", "by_task"), ("by category", "by_category")]
    if list(arm["by_task"]) == list(arm["by_category"]):
        shown = shown[1:]
    return [(title, key) for title, key in shown if arm[key]]


def show(value: Json, most: int = 3, questions: int = FEW) -> str:
    """An estimate with its interval, with at most so many decimals.

    >>> show({"estimate": 2.5, "low": 2.4, "high": 2.6}), show({"estimate": 2.5, "low": 2.4, "high": 2.6}, questions=6)
    ('2.500 [2.400, 2.600]', '2.5 [2.4, 2.6]')
    """
    if value["estimate"] is None:
        return "-"
    digits = decimals(value["estimate"], questions, most)
    text = f"{value['estimate']:.{digits}f}"
    return text if value["low"] is None else f"{text} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def _shown(metric: Metric, part: Json) -> str:
    values = part["timing" if metric.timing else "metrics"]
    return show(values[metric.key], metric.digits, part["questions"]) if metric.key in values else "-"


def _table(first: str, *numbers: str) -> Table:
    """An empty table: a column of names, then columns of numbers."""
    return Table(first, *(Column(header, justify="right") for header in numbers))


_OF_GROUPS = (("metrics", "tau"), ("timing", "speedup"))


def _group_table(arms: Sequence[Json], key: str) -> Table:
    drafting = [arm for arm in arms if arm["k"]]
    widest = max(drafting, key=lambda arm: int(arm["k"]))
    headers = [f"{label} {arm['name']}" for arm in drafting for label in ("τ", "speed-up")]
    table = _table("group", "questions", *headers, f"drafts 1, 2, … all accepted, {widest['name']}")
    table.columns[1].justify = "left"
    for name in drafting[0][key]:
        cells = [arm[key][name] for arm in drafting]
        values = [(cell, cell[part].get(metric)) for cell in cells for part, metric in _OF_GROUPS]
        shown = [show(value, 2, cell["questions"]) if value else "-" for cell, value in values]
        positions = " ".join(show({**value, "low": None}, 2) for value in widest[key][name]["unconditional"])
        table.add_row(name, str(cells[0]["questions"]), *shown, positions)
    return table


def _position_table(arms: Sequence[Json]) -> Table:
    drafting = [arm for arm in arms if arm["k"]]
    table = _table("position", *(arm["name"] for arm in drafting))
    for j in range(max((arm["k"] for arm in drafting), default=0)):
        cells = [
            "\n".join(show(arm[kind][j], 3, arm["questions"]) for kind in POSITIONS) if j < arm["k"] else ""
            for arm in drafting
        ]
        table.add_row(str(j + 1), *cells)
    return table


def predicted(cell: Json, questions: int) -> str:
    """A predicted speed-up, marked with * where it is extrapolated."""
    return f"{cell['speedup']:.{decimals(cell['speedup'], questions, 2)}f}{'*' if cell['extrapolated'] else ''}"


def advice(document: Json) -> list[str]:
    """The K to take at each batch size, in words: K=0, or lookup, where none is predicted to be faster."""
    prediction = document["timing"]["prediction"]
    questions = document["arms"][0]["questions"]
    is_lookup = not any(model["head"] for model in document["provenance"]["settings"]["models"].values())
    none = "take K=0 (no drafts)"
    if not is_lookup:
        none += " or --draft lookup, whose rounds cost no more where it finds no match"
    if not prediction["table"]:
        reason = prediction.get("reason", "there were no rounds to time")  # documents of before say none
        speeds = [arm["timing"]["speedup"]["estimate"] or math.inf for arm in document["arms"] if arm["k"]]
        slow = [f"{none}: no K was measured to be faster than the target alone"] if max(speeds) <= 1 else []
        return [f"speed-up not predicted: {reason}", *slow]
    found = []
    for size in prediction["round_seconds"]:
        best = prediction["best"].get(size)
        text = f"{none}: no K up to the largest measured is predicted to be faster than the target alone"
        if best is not None:
            speed = f"{best['speedup']:.{decimals(best['speedup'], questions, 2)}f} × the target alone"
            text = f"K={best['k']} is predicted to be the fastest up to the largest measured, {speed}"
        found.append(f"batch {size}: {text}{untried(prediction, size)}")
    return found


def untried(prediction: Json, size: str) -> str:
    """What to measure where a K beyond the measured ones is predicted to be faster than all of those; else ""."""
    cells = [cell for cell in prediction["table"] if str(cell["batch_size"]) == size]
    beyond = [cell for cell in cells if cell["extrapolated"]]
    within = max([1.0, *(cell["speedup"] for cell in cells if not cell["extrapolated"])])
    if not beyond or max(cell["speedup"] for cell in beyond) <= within:
        return ""
    return f"; larger K may be faster, which nothing here has measured: try -k {min(cell['k'] for cell in beyond)}"


def _difference_table(found: Json, questions: int) -> Table:
    table = _table("", "difference")
    for key, value in {**found["metrics"], **found["timing"]}.items():
        metric = METRICS.get(key)
        label, digits = (metric.label, metric.digits) if metric else ("speed, ratio of totals", 3)
        table.add_row(label, show(value, digits, questions))
    return table
