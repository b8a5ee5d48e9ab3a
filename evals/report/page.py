"""An acceptance document as one self-contained page: pictures with their values as tables, no script."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from evals.acceptance.metrics import METRICS
from evals.acceptance.summary import Json
from evals.errors import require
from evals.report.terminal import (
    advice,
    cautions,
    groupings,
    headline,
    metric_parts,
    predicted,
    show,
    template,
    untried,
)

_COLOURS = ("#2f6f9f", "#c8742c", "#4d8b57", "#8b5a9b", "#a8484e", "#6b6b6b")
_BARS = "Bars at the points: the intervals defined at the top of the page."
_KINDS = {
    "conditional": ("conditional", "-"),
    "unconditional": ("unconditional", "--"),
    "per_position_vllm": ("as vLLM", ""),
}
"""Kinds of acceptance at a draft position: name, and line; vLLM's is in the table alone."""


@dataclass(frozen=True)
class Picture:
    """A picture of the page: a caption that defines what is drawn, the drawing, and its values as a table."""

    title: str
    caption: str
    svg: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def _positions(arms: Sequence[Json], definitions: Json) -> Picture:
    """Acceptance at each draft position, with intervals."""
    axes = _axes()
    width = max(arm["k"] for arm in arms)
    rows = []
    for colour, arm in zip(cycle(_COLOURS), arms, strict=False):
        for kind, (name, style) in _KINDS.items():
            if style:
                places, values, errors = _series(arm[kind])
                label = f"{arm['name']} {kind}"
                axes.errorbar(places, values, errors, fmt="o" + style, color=colour, capsize=3, label=label)
            shown = (show(value, 3, arm["questions"]) for value in arm[kind])
            rows.append((f"{arm['name']} {name}", *shown, *[""] * (width - arm["k"])))
    axes.set(xlabel="draft position", ylabel="acceptance", ylim=(0, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return Picture(
        "Acceptance per draft position",
        f"Solid, conditional: {definitions['conditional']} Dashed, unconditional: {definitions['unconditional']} "
        f"{_BARS} In the table also, as vLLM: {definitions['per_position_vllm']}",
        _svg(axes),
        ("draft position", *(str(j + 1) for j in range(width))),
        rows,
    )


def _accepted(arms: Sequence[Json], definitions: Json) -> Picture:
    """Share of rounds by the number of accepted drafts."""
    axes = _axes()
    width = 0.8 / len(arms)
    rows = [[str(j)] for j in range(max(len(arm["histogram"]) for arm in arms))]
    for i, arm in enumerate(arms):
        counts = arm["histogram"]
        shares = [count / (sum(counts) or 1) for count in counts]
        axes.bar([j + (i - (len(arms) - 1) / 2) * width for j in range(len(shares))], shares, width, label=arm["name"])
        cells = [f"{count:,} ({share:.1%})" for count, share in zip(counts, shares, strict=True)]
        for j, row in enumerate(rows):
            row.append(cells[j] if j < len(cells) else "")
    axes.set(xlabel="accepted drafts in a round", ylabel="share of rounds")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return Picture(
        "Accepted drafts in a round",
        f"{definitions['histogram']} Height of a bar: share of all rounds of its configuration; rounds without "
        "drafts, where a length limit leaves no room for any, count as 0.",
        _svg(axes),
        ("accepted drafts", *(f"{arm['name']}: rounds (share)" for arm in arms)),
        rows,
    )


def _by_group(arms: Sequence[Json], definitions: Json, group: str, title: str, metric: tuple[str, str, str]) -> Picture:
    """One metric (its section, key and label) by category or task, with intervals."""
    section, key, label = metric
    names = list(arms[0][group])
    axes = _axes(1.2 + 0.32 * len(names) * max(len(arms) * 0.7, 1))
    height = 0.8 / len(arms)
    rows = [[name, str(arms[0][group][name]["questions"])] for name in names]
    for i, arm in enumerate(arms):
        parts = [arm[group][name] for name in names]
        places, values, errors = _series([part[section][key] for part in parts])
        shifted = [place - 1 + (i - (len(arms) - 1) / 2) * height for place in places]
        axes.barh(shifted, values, height, xerr=errors, capsize=2, label=arm["name"])
        for row, part in zip(rows, parts, strict=True):
            row.append(show(part[section][key], 3, part["questions"]))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel=label)
    return Picture(
        f"{label} {title}",
        f"{definitions[key]} Lines at the ends of bars: the intervals defined at the top of the page.",
        _svg(axes),
        ("group", "questions", *(arm["name"] for arm in arms)),
        rows,
    )


def _speedup_over_k(arms: Sequence[Json], definitions: Json, prediction: Json) -> Picture:
    """Measured speed-up of each K with its interval, and the predicted curve of each batch size (decode only)."""
    axes = _axes()
    measured = {arm["k"]: arm["timing"]["speedup_decode"] for arm in arms}
    rows = {k: [str(k), "-"] for k in sorted({*measured, *(cell["k"] for cell in prediction["table"])})}
    for arm in arms:
        rows[arm["k"]][1] = show(measured[arm["k"]], 3, arm["questions"])
    for size in prediction["round_seconds"]:
        cells = {cell["k"]: cell for cell in prediction["table"] if str(cell["batch_size"]) == size}
        speedups = [cell["speedup"] for cell in cells.values()]
        axes.plot(list(cells), speedups, ":", label=f"predicted, batch {size}")
        for k, row in rows.items():
            row.append(predicted(cells[k], arms[0]["questions"]) if k in cells else "-")
    values, errors = _series(list(measured.values()))[1:]
    axes.errorbar(list(measured), values, errors, fmt="ko", capsize=3, label="measured, decode only")
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    axes.set(xlabel="K (drafts a round)", ylabel="speed-up over the target alone")
    return Picture(
        "Speed-up over K",
        f"Black points, measured: {definitions['speedup_decode']} {_BARS} Dotted lines, predicted for a batch "
        f"size: {definitions['prediction']} A guess where K was not measured. Grey line: the target alone.",
        _svg(axes),
        ("K", "measured", *(f"predicted, batch {size}" for size in prediction["round_seconds"])),
        list(rows.values()),
    )


def _series(values: Sequence[Json]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Places from 1, estimates [n], and lengths below and above them [2, n] of the values that are defined."""
    known = {place: value for place, value in enumerate(values, 1) if value["estimate"] is not None}
    estimates, low, high = (
        np.array([value["estimate"] if value[name] is None else value[name] for value in known.values()])
        for name in ("estimate", "low", "high")
    )
    return list(known), estimates, np.maximum([estimates - low, high - estimates], 0.0)


def _axes(height: float = 3.4) -> Any:
    """Axes to draw on."""
    require("matplotlib", "eval")
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5.2, height), layout="constrained").add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(color=_COLOURS)
    return axes


def _svg(axes: Any) -> str:
    import matplotlib

    # above the axes, where it covers nothing
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "specdec", "svg.fonttype": "none", "font.family": "sans-serif"}):
        axes.figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def render(document: Json) -> str:
    """The page as HTML text."""
    settings = document["provenance"]["settings"]
    targets = sorted({str(model["target"]) for model in settings["models"].values()})
    return template("report.html").render(
        value=partial(show, questions=document["arms"][0]["questions"]),
        document=document,
        settings=settings,
        metrics=METRICS.values(),
        metric_parts=metric_parts(),
        predicted=predicted,
        pictures=_pictures(document),
        provenance=json.dumps(document["provenance"], indent=2, ensure_ascii=False),
        title=f"Acceptance of {' and '.join(targets)} on {settings['data']['name']}",
        headline=headline(document),
        cautions=cautions(document),
        advice=advice(document) if "timing" in document else [],
        untried=untried,
    )


def render_certificate(document: Json) -> str:
    """The page of a certificate as HTML text."""
    provenance = json.dumps(document, indent=2, ensure_ascii=False)
    title = f"Certificate of {document['options']['model']}"
    return template("certificate.html").render(document=document, title=title, provenance=provenance)


def _pictures(document: Json) -> list[Picture]:
    """The pictures of the page."""
    arms = [arm for arm in document["arms"] if arm["k"]]
    definitions = document["definitions"]
    found = [_positions(arms, definitions), _accepted(arms, definitions)]
    metrics = [("metrics", "tau", "τ")]
    if "timing" in document:
        metrics.append(("timing", "speedup", "Speed-up"))
    found += [
        _by_group(arms, definitions, group, title, metric) for title, group in groupings(arms[0]) for metric in metrics
    ]
    if "timing" in document:
        found.append(_speedup_over_k(arms, definitions, document["timing"]["prediction"]))
    return found
