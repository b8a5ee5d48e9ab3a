"""The pictures of the report, as SVG text: drawn by matplotlib, without any reference to the outside."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from evals.acceptance.summary import Json
from evals.errors import require

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
        _legend(axes)

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
        _legend(axes)

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
        _legend(axes)

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
        _legend(axes)

    return _svg(draw)


def _series(values: Sequence[Json]) -> tuple[list[int], list[float], list[list[float]]]:
    """Places from 1, estimates, and [below, above] error lengths of the values that are defined."""
    known = [(i + 1, value) for i, value in enumerate(values) if value["estimate"] is not None]
    estimates = [value["estimate"] for _, value in known]
    below = [max(v["estimate"] - v["low"], 0.0) if v["low"] is not None else 0.0 for _, v in known]
    above = [max(v["high"] - v["estimate"], 0.0) if v["high"] is not None else 0.0 for _, v in known]
    return [place for place, _ in known], estimates, [below, above]


def _legend(axes: Any) -> None:
    """Above the axes, where it hides nothing."""
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def _cycle(items: Any) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(len(items))]


def _svg(draw: Callable[[Any], None], height: float = 3.6) -> str:
    require("matplotlib", "eval")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "specdec", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
