"""An acceptance document as one self-contained page: pictures inline, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from evals.acceptance.metrics import METRICS
from evals.acceptance.summary import Json
from evals.report import pictures, values
from evals.report.headline import cautions, headline
from evals.report.terminal import groupings, show, untried


def render(document: Json) -> str:
    """The page as HTML text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["value"] = show
    template = environment.from_string(files("evals").joinpath("report/templates/report.html.j2").read_text("utf-8"))
    settings = document["provenance"]["settings"]
    return template.render(
        document=document,
        settings=settings,
        metrics=METRICS,
        pictures=_pictures(document),
        provenance=json.dumps(document["provenance"], indent=2, ensure_ascii=False),
        title=_title(document),
        headline=headline(document),
        cautions=cautions(document),
        untried=untried,
    )


def _title(document: Json) -> str:
    models = document["provenance"]["settings"]["models"].values()
    data = document["provenance"]["settings"]["data"]["name"]
    return f"Acceptance of {' and '.join(sorted({str(model['target']) for model in models}))} on {data}"


_BARS = "Bars at the points: the intervals defined at the top of the page."


def _pictures(document: Json) -> list[dict[str, Any]]:
    """Each with its title, a caption that defines what is drawn, the drawing, and its values."""
    arms, definitions = [arm for arm in document["arms"] if arm["k"]], document["definitions"]
    found = [
        _picture(
            "Acceptance per draft position",
            f"Solid, conditional: {definitions['conditional']} Dashed, unconditional: {definitions['unconditional']} "
            f"{_BARS} In the table also, as vLLM: {definitions['per_position_vllm']}",
            pictures.acceptance_per_position(arms),
            values.of_positions(arms),
        ),
        _picture(
            "Accepted drafts in a round",
            f"{definitions['histogram']} Height of a bar: share of all rounds of its configuration; rounds without "
            "drafts, where a length limit leaves no room for any, count as 0.",
            pictures.accepted_histogram(arms),
            values.of_histogram(arms),
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
                    pictures.by_group(arms, group, section, key, label),
                    values.of_groups(arms, group, section, key),
                )
            )
    if "timing" in document:
        prediction = document["timing"]["prediction"]
        found.append(
            _picture(
                "Speed-up over K",
                f"Black points, measured: {definitions['speedup_decode']} {_BARS} Dotted lines, predicted for a batch "
                f"size: {definitions['prediction']} A guess where K was not measured. Grey line: the target alone.",
                pictures.speedup_over_k(arms, prediction),
                values.of_speedup(arms, prediction),
            )
        )
    return found


def _picture(title: str, caption: str, svg: str, table: values.Values) -> dict[str, Any]:
    return {"title": title, "caption": caption, "svg": svg, "values": table}
