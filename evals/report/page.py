"""An acceptance document as one self-contained page: pictures with their values as tables, no script."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from evals.acceptance.metrics import METRICS
from evals.acceptance.summary import Json
from evals.errors import require
from evals.report.terminal import (
    POSITIONS,
    cautions,
    groupings,
    headline,
    metric_parts,
    predicted,
    show,
    untried,
)

_COLOURS = ("#2f6f9f", "#c8742c", "#4d8b57", "#8b5a9b", "#a8484e", "#6b6b6b")


def acceptance_per_position(arms: Sequence[Json]) -> str:
    """Conditional (solid) and unconditional (dashed) acceptance at each draft position, with intervals."""

    def draw(axes: Any) -> None:
        for colour, arm in zip(_cycle(arms), arms, strict=True):
            for key, style in (("conditional", "-"), ("unconditional", "--")):
                places, values, errors = _series(arm[key])
                axes.errorbar(
                    places, values, errors, fmt="o" + style, color=colour, capsize=3, label=f"{arm['name']} {key}"
                )
        axes.set(xlabel="draft position", ylabel="acceptance", ylim=(0, 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)

    return _svg(draw)


def accepted_histogram(arms: Sequence[Json]) -> str:
    """Share of rounds by the number of accepted drafts."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(arms)
        for i, (colour, arm) in enumerate(zip(_cycle(arms), arms, strict=True)):
            total = sum(arm["histogram"]) or 1
            shares = [count / total for count in arm["histogram"]]
            places = [j + (i - (len(arms) - 1) / 2) * width for j in range(len(shares))]
            axes.bar(places, shares, width, color=colour, label=arm["name"])
        axes.set(xlabel="accepted drafts in a round", ylabel="share of rounds")
        axes.xaxis.get_major_locator().set_params(integer=True)

    return _svg(draw)


def by_group(arms: Sequence[Json], group: str, section: str, metric: str, label: str) -> str:
    """One metric by category or task, with intervals; `section` is "metrics" or "timing"."""
    names = list(arms[0][group])

    def draw(axes: Any) -> None:
        height = 0.8 / len(arms)
        for i, (colour, arm) in enumerate(zip(_cycle(arms), arms, strict=True)):
            places, values, errors = _series([arm[group][name][section][metric] for name in names])
            shifted = [place - 1 + (i - (len(arms) - 1) / 2) * height for place in places]
            axes.barh(shifted, values, height, xerr=errors, color=colour, capsize=2, label=arm["name"])
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set(xlabel=label)

    return _svg(draw, height=1.2 + 0.32 * len(names) * max(len(arms) * 0.7, 1))


def speedup_over_k(arms: Sequence[Json], prediction: Json) -> str:
    """Measured speed-up of each K with its interval, and the predicted curve of each batch size (decode only)."""

    def draw(axes: Any) -> None:
        for colour, size in zip(_cycle(prediction["round_seconds"]), prediction["round_seconds"], strict=True):
            cells = [cell for cell in prediction["table"] if str(cell["batch_size"]) == size]
            axes.plot(
                [cell["k"] for cell in cells],
                [cell["speedup"] for cell in cells],
                ":",
                color=colour,
                label=f"predicted, batch {size}",
            )
        values, errors = _series([arm["timing"]["speedup_decode"] for arm in arms])[1:]
        axes.errorbar([arm["k"] for arm in arms], values, errors, fmt="ko", capsize=3, label="measured, decode only")
        axes.axhline(1.0, color="#999999", linewidth=0.8)
        axes.set(xlabel="K (drafts a round)", ylabel="speed-up over the target alone")

    return _svg(draw)


def _series(values: Sequence[Json]) -> tuple[list[int], list[float], list[list[float]]]:
    """Places from 1, estimates, and [below, above] error lengths of the values that are defined."""
    known = [(i + 1, value) for i, value in enumerate(values) if value["estimate"] is not None]
    estimates = [value["estimate"] for _, value in known]
    below = [max(v["estimate"] - v["low"], 0.0) if v["low"] is not None else 0.0 for _, v in known]
    above = [max(v["high"] - v["estimate"], 0.0) if v["high"] is not None else 0.0 for _, v in known]
    return [place for place, _ in known], estimates, [below, above]


def _cycle(items: Any) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(len(items))]


def _svg(draw: Callable[[Any], None], height: float = 3.4) -> str:
    require("matplotlib", "eval")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "specdec", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        # above the axes, where it covers nothing
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


@dataclass(frozen=True)
class Values:
    """A table: column names, and rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def of_positions(arms: Sequence[Json]) -> Values:
    """Acceptance at each draft position; vLLM's is in the table alone."""
    width = max(arm["k"] for arm in arms)
    rows = (
        (
            f"{arm['name']} {_NAMES[kind]}",
            *(show(arm[kind][j], 3, arm["questions"]) if j < arm["k"] else "" for j in range(width)),
        )
        for arm in arms
        for kind in POSITIONS
    )
    return Values(("draft position", *(str(j + 1) for j in range(width))), tuple(rows))


_NAMES = {"conditional": "conditional", "unconditional": "unconditional", "per_position_vllm": "as vLLM"}


def of_histogram(arms: Sequence[Json]) -> Values:
    """Rounds by accepted drafts, with their share."""
    rows = []
    for j in range(max(len(arm["histogram"]) for arm in arms)):
        cells = []
        for arm in arms:
            counts = arm["histogram"]
            share = counts[j] / (sum(counts) or 1) if j < len(counts) else 0.0
            cells.append(f"{counts[j]:,} ({share:.1%})" if j < len(counts) else "")
        rows.append((str(j), *cells))
    return Values(("accepted drafts", *(f"{arm['name']}: rounds (share)" for arm in arms)), tuple(rows))


def of_groups(arms: Sequence[Json], group: str, section: str, metric: str) -> Values:
    """One metric by category or task."""
    rows = (
        (name, str(arms[0][group][name]["questions"]), *(_of_group(arm[group][name], section, metric) for arm in arms))
        for name in arms[0][group]
    )
    return Values(("group", "questions", *(arm["name"] for arm in arms)), tuple(rows))


def _of_group(part: Json, section: str, metric: str) -> str:
    return show(part[section][metric], 3, part["questions"])


def of_speedup(arms: Sequence[Json], prediction: Json) -> Values:
    """Measured and predicted speed-up, decode only, by K."""
    measured = {arm["k"]: show(arm["timing"]["speedup_decode"], 3, arm["questions"]) for arm in arms}
    cells = {(str(cell["batch_size"]), cell["k"]): cell for cell in prediction["table"]}
    sizes = list(prediction["round_seconds"])
    rows = (
        (
            str(k),
            measured.get(k, "-"),
            *(predicted(cells[size, k], arms[0]["questions"]) if (size, k) in cells else "-" for size in sizes),
        )
        for k in sorted({*measured, *(k for _, k in cells)})
    )
    return Values(("K", "measured", *(f"predicted, batch {size}" for size in sizes)), tuple(rows))


def render(document: Json) -> str:
    """The page as HTML text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["value"] = partial(show, questions=document["arms"][0]["questions"])
    template = environment.from_string(files("evals").joinpath("report/templates/report.html.j2").read_text("utf-8"))
    settings = document["provenance"]["settings"]
    targets = sorted({str(model["target"]) for model in settings["models"].values()})
    return template.render(
        document=document,
        settings=settings,
        metrics=METRICS,
        metric_parts=metric_parts(),
        predicted=predicted,
        pictures=_pictures(document),
        provenance=json.dumps(document["provenance"], indent=2, ensure_ascii=False),
        title=f"Acceptance of {' and '.join(targets)} on {settings['data']['name']}",
        headline=headline(document),
        cautions=cautions(document),
        untried=untried,
    )


_BARS = "Bars at the points: the intervals defined at the top of the page."


def _pictures(document: Json) -> list[dict[str, Any]]:
    """The pictures of the page: title, a caption that defines what is drawn, the drawing, and its values."""
    arms, definitions = [arm for arm in document["arms"] if arm["k"]], document["definitions"]
    found = [
        _picture(
            "Acceptance per draft position",
            f"Solid, conditional: {definitions['conditional']} Dashed, unconditional: {definitions['unconditional']} "
            f"{_BARS} In the table also, as vLLM: {definitions['per_position_vllm']}",
            acceptance_per_position(arms),
            of_positions(arms),
        ),
        _picture(
            "Accepted drafts in a round",
            f"{definitions['histogram']} Height of a bar: share of all rounds of its configuration; rounds without "
            "drafts, where a length limit leaves no room for any, count as 0.",
            accepted_histogram(arms),
            of_histogram(arms),
        ),
    ]
    for title, group in groupings(arms[0]):
        metrics = [("metrics", "tau", "τ")]
        if "timing" in document:
            metrics.append(("timing", "speedup", "Speed-up"))
        for section, key, label in metrics:
            found.append(
                _picture(
                    f"{label} {title}",
                    f"{definitions[key]} Lines at the ends of bars: the intervals defined at the top of the page.",
                    by_group(arms, group, section, key, label),
                    of_groups(arms, group, section, key),
                )
            )
    if "timing" in document:
        prediction = document["timing"]["prediction"]
        found.append(
            _picture(
                "Speed-up over K",
                f"Black points, measured: {definitions['speedup_decode']} {_BARS} Dotted lines, predicted for a batch "
                f"size: {definitions['prediction']} A guess where K was not measured. Grey line: the target alone.",
                speedup_over_k(arms, prediction),
                of_speedup(arms, prediction),
            )
        )
    return found


def _picture(title: str, caption: str, svg: str, table: Values) -> dict[str, Any]:
    return {"title": title, "caption": caption, "svg": svg, "values": table}
